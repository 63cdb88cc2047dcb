"""Sends an answer as server-sent events.

Invariant: a failure before the first event is an HTTP status; a failure after it is an event with `error`, and no
`[DONE]` follows.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.errors import PenstockError
from services.router.frontends.openai.errors import body_of

log = structlog.get_logger()

_REPORT_S = 10.0
"""Seconds that a client has to read a failure; a client that does not read would hold its request forever."""

SendEvent: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]
"""Sends one event."""


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
        """ResumableStream."""
        has_begun = False

        async def write(text: str) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self._head()})
            body = f"data: {text}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            await self._produce(lambda event: write(json.dumps(event, ensure_ascii=False)))
            await write("[DONE]")
        except (PenstockError, TimeoutError) as error:
            if not has_begun:
                raise
            body = body_of(error)
            log.warning("stream.failed", path=scope["path"], error=body["error"]["message"])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_S):
                    await write(json.dumps(body))
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
