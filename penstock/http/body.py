"""Bodies of requests, read whole, within a bound on each one's size and one on the memory of all of them together.

A body counts with what it may take once it is read as JSON, from when it arrives until its request is answered. Where
large ones have all the room that is theirs, small ones still find some.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.exceptions import HTTPException
from starlette.types import Receive

from penstock.http.json_body import memory_of

_MAX_DISCARDED = 4
_MAX_PAUSE_S = 120.0
"""A client that sends nothing of a body for so long holds room for nothing."""
_SMALL_BYTES = 256 * 2**10
"""Of memory, not of the body."""
_SHARE_OF_LARGE = 7 / 8
_CLOSE = {"Connection": "close"}


class GoneError(Exception):
    """The client went away before its request was complete."""


class Bodies:
    """All bodies that a server holds."""

    def __init__(self, *, max_body_bytes: int, max_memory_bytes: int) -> None:
        self.memory_bytes = 0
        """What those count that are held."""
        self._max_body_bytes = max_body_bytes
        self._max_memory_bytes = max_memory_bytes

    @contextlib.asynccontextmanager
    async def whole(self, receive: Receive) -> AsyncIterator[bytes]:
        """The body, whose memory counts while the context lasts.

        Raises:
            GoneError: the client went away.
            HTTPException: the body is too large, or there is no room for it, or it ceased to arrive.
        """
        room = _Room(self)
        try:
            body = await self._read(receive, room)
            room.grow(memory_of(body))
            yield body
        finally:
            room.leave()

    def room_for(self, memory_bytes: int) -> int:
        """What all bodies may count together for one of `memory_bytes` to be taken."""
        return self._max_memory_bytes if memory_bytes <= _SMALL_BYTES else int(_SHARE_OF_LARGE * self._max_memory_bytes)

    async def _read(self, receive: Receive, room: "_Room") -> bytes:
        refusal: HTTPException | None = None
        parts, size_bytes = [], 0
        while True:
            try:
                async with asyncio.timeout(_MAX_PAUSE_S):
                    message = await receive()
            except TimeoutError:
                detail = f"nothing more of the body came for {_MAX_PAUSE_S:.0f} s; send the request again"
                raise HTTPException(408, detail, _CLOSE) from None
            if message["type"] == "http.disconnect":
                raise GoneError
            part, is_last = message.get("body", b""), not message.get("more_body", False)
            size_bytes += len(part)
            if refusal is None:
                try:
                    self._require_allowed(size_bytes)
                    room.grow(size_bytes)
                    parts.append(part)
                except HTTPException as error:
                    refusal = error
                    parts.clear()
                    room.leave()
            # Where it is refused, read on, in bounds: a client that is still sending would not hear the answer.
            if refusal is not None and (is_last or size_bytes > _MAX_DISCARDED * self._max_body_bytes):
                raise HTTPException(refusal.status_code, refusal.detail, None if is_last else _CLOSE)
            if is_last:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _require_allowed(self, size_bytes: int) -> None:
        if size_bytes > self._max_body_bytes:
            detail = f"the body is larger than {self._max_body_bytes} bytes; send fewer or shorter items in one request"
            raise HTTPException(413, detail)


class _Room:
    """What one body counts of the memory of all."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._memory_bytes = 0

    def grow(self, memory_bytes: int) -> None:
        """Count `memory_bytes` from now on."""
        others_bytes = self._bodies.memory_bytes - self._memory_bytes
        most_bytes = self._bodies.room_for(memory_bytes)
        if memory_bytes > most_bytes:
            detail = (
                f"the body would take {memory_bytes} bytes of memory once it is read, and may take {most_bytes}; "
                "send fewer or shorter items in one request"
            )
            raise HTTPException(413, detail)
        if others_bytes + memory_bytes > most_bytes:
            detail = (
                f"requests being answered take {others_bytes} bytes of memory, and this one would not fit; try later"
            )
            raise HTTPException(429, detail)
        self._bodies.memory_bytes += memory_bytes - self._memory_bytes
        self._memory_bytes = memory_bytes

    def leave(self) -> None:
        """Count nothing any more."""
        self._bodies.memory_bytes -= self._memory_bytes
        self._memory_bytes = 0
