"""Sends an answer as server-sent events.

Invariant: a failure before the first event is an HTTP status; a failure after it is an event with `error`, and no
`[DONE]` follows.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import msgspec
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.http.body import release_body
from services.router.frontends.openai.errors import body_of

log = structlog.get_logger()

_REPORT_S = 10.0
"""Seconds that a client has to read a failure; a client that does not read would hold its request forever."""

SendEvent: TypeAlias = Callable[[bytes], Awaitable[None]]
"""Sends one event, as `encode_event` returns it."""


def encode_event(event: Mapping[str, Any]) -> bytes:
    """Return the event as it is sent. msgspec is fast, which matters in a thread too: encoders hold the GIL."""
    return _framed(msgspec.json.encode(event))


def _framed(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """The response. It sends the events of `produce`, and then how it ended."""

    media_type = "text/event-stream"

    def __init__(
        self, produce: Callable[[SendEvent], Awaitable[None]], headers: Callable[[], Mapping[str, str]]
    ) -> None:
        """Respond with `produce`, which is called once, and `headers`, called when it sends the first event."""
        super().__init__()
        self._produce = produce
        self._later_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Release the request's body, which its caller has parsed, and send the answer."""
        release_body(scope)
        has_begun = False

        async def write(event: bytes) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self._head()})
            await send({"type": "http.response.body", "body": event, "more_body": True})

        try:
            await self._produce(write)
            await write(_framed(b"[DONE]"))
        except (PenstockError, TimeoutError) as error:
            if not has_begun:
                raise
            body = body_of(error)
            log.warning("stream.failed", path=scope["path"], error=body["error"]["message"])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_S):
                    await write(_framed(json.dumps(body).encode()))
                    await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "http.response.body", "body": b""})

    def _head(self) -> list[tuple[bytes, bytes]]:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **self._later_headers(),
        }
        return [(name.encode(), value.encode()) for name, value in headers.items()]
