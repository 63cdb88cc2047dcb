"""Reads complete request bodies, within a bound on each body and a bound on all bodies together.

Invariant: a body counts from its first byte until its request is answered or the application releases it, and a part
that does not fit is refused before it is stored. Large bodies may take seven eighths of the room, so that small ones
always find some. Where bodies wait, a large one whose size is declared waits until there is room for all of it, and
counts from then on. So a body that is partly stored never waits for another.

An application that answers for minutes releases a body once it keeps only what it made of it, and bounds that itself:
the router's wait queue counts the requests that wait, with their images, and its slots bound those that engines answer.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope

_BODIES_OF_MAX_SIZE = 2
"""All bodies together may hold this many times `max_body_bytes`; parsed as JSON they take 4 to 10 times that."""
_LARGE_SHARE = 7 / 8
_SMALL_BYTES = 64 * 2**10
_MAX_DISCARDED = 4
_MAX_PAUSE_S = 120.0
"""Seconds without a part of its body after which a client is refused, because its body holds room that others need."""
_CLOSE = {"Connection": "close"}
_SCOPE_KEY = "penstock.body"


class GoneError(Exception):
    """The client disconnected before its request was complete."""


class Bodies:
    """The request bodies that a server holds."""

    def __init__(self, max_body_bytes: int, *, max_wait_s: float = 0.0) -> None:
        """Hold bodies of `max_body_bytes` at most; let large ones wait for room for `max_wait_s` seconds."""
        self.num_bytes = 0
        """Bytes of all bodies held."""
        self._max_body_bytes = max_body_bytes
        self._max_bytes = _BODIES_OF_MAX_SIZE * max_body_bytes
        self._max_wait_s = max_wait_s
        self._turn = asyncio.Lock()
        """Held by the large body that gets the next room, so that they get it in their order."""
        self._has_freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def whole(self, receive: Receive, *, declared_bytes: int = 0) -> AsyncIterator["HeldBody"]:
        """Yield the complete body, whose bytes count during the context, unless it is released before.

        Args:
            receive: Returns the parts of the body.
            declared_bytes: Its size as its client declares it; 0: unknown, so that it does not wait for room.

        Raises:
            GoneError: the client disconnected.
            HTTPException: the body is too large (413), finds no room (429), or stopped arriving (408).
        """
        held = HeldBody(self)
        try:
            if self._max_wait_s and _SMALL_BYTES < declared_bytes <= self._max_body_bytes:
                with contextlib.suppress(TimeoutError):  # then it is refused when a part does not fit
                    async with asyncio.timeout(self._max_wait_s):
                        await self._reserve(declared_bytes, held)
            held.data = await self._read(receive, held)
            yield held
        finally:
            held.release()

    def note_freed(self) -> None:
        """Let the body that waits for room look again."""
        self._has_freed.set()

    async def _reserve(self, num_bytes: int, held: "HeldBody") -> None:
        """Wait until a large body has room, and count it."""
        async with self._turn:
            while self.num_bytes + num_bytes > self._most_bytes(num_bytes):
                self._has_freed.clear()
                await self._has_freed.wait()
            held.grow(num_bytes)

    def _most_bytes(self, size_bytes: int) -> int:
        """Return how many bytes all bodies may take once one of `size_bytes` is among them."""
        return self._max_bytes if size_bytes <= _SMALL_BYTES else int(_LARGE_SHARE * self._max_bytes)

    async def _read(self, receive: Receive, held: "HeldBody") -> bytes:
        refusal: HTTPException | None = None
        parts, size_bytes = [], 0
        while True:
            try:
                async with asyncio.timeout(_MAX_PAUSE_S):
                    message = await receive()
            except TimeoutError:
                detail = f"no more of the body arrived for {_MAX_PAUSE_S:.0f} s; send the request again"
                raise HTTPException(408, detail, _CLOSE) from None
            if message["type"] == "http.disconnect":
                raise GoneError
            part, is_last = message.get("body", b""), not message.get("more_body", False)
            size_bytes += len(part)
            if refusal is None:
                try:
                    self._require_room(size_bytes, held)
                    parts.append(part)
                except HTTPException as error:
                    refusal = error
                    parts.clear()
                    held.release()
            # The rest of a refused body is read, within a bound: a client reads the answer only after sending
            # everything.
            if refusal is not None and (is_last or size_bytes > _MAX_DISCARDED * self._max_body_bytes):
                raise HTTPException(refusal.status_code, refusal.detail, None if is_last else _CLOSE)
            if is_last:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _require_room(self, size_bytes: int, held: "HeldBody") -> None:
        """Count `size_bytes` for this body, unless it already counts as many.

        Raises:
            HTTPException: the body is too large (413), or other bodies leave it no room (429).
        """
        if size_bytes > self._max_body_bytes:
            detail = f"the body is larger than {self._max_body_bytes} bytes; send fewer or shorter items in one request"
            raise HTTPException(413, detail)
        if size_bytes <= held.num_bytes:
            return
        others_bytes = self.num_bytes - held.num_bytes
        if others_bytes + size_bytes > self._most_bytes(size_bytes):
            raise HTTPException(
                429, f"bodies of other requests take {others_bytes} bytes, and this one would not fit; try again later"
            )
        held.grow(size_bytes)


class HeldBody:
    """One body, and the bytes charged for it."""

    def __init__(self, bodies: Bodies) -> None:
        """Start without any bytes among `bodies`."""
        self.data = b""
        """The complete body; empty before it is read and once it is released."""
        self.num_bytes = 0
        self._bodies = bodies

    def grow(self, num_bytes: int) -> None:
        """Charge `num_bytes` in all."""
        self._bodies.num_bytes += num_bytes - self.num_bytes
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Forget the body, which no longer counts."""
        self.data = b""
        self.grow(0)
        self._bodies.note_freed()

    def offer_in(self, scope: Scope) -> None:
        """Let the application of this request release the body."""
        scope[_SCOPE_KEY] = self


def release_body(scope: Scope) -> None:
    """Stop counting the body of this request, of which the application holds neither bytes nor text any longer.

    The application bounds what it still holds by other means.
    """
    held: HeldBody | None = scope.get(_SCOPE_KEY)  # None: no boundary is around the application
    if held is not None:
        held.release()
