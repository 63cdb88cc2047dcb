"""Sends an answer once it is complete.

Invariant: while it is generated, nothing holds the body of its request or the JSON read from it. FastAPI holds both
until an endpoint returns, so the endpoint returns this response first, and the response generates the answer.
"""

from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.http.body import release_body


class WholeAnswer(Response):
    """The response. Errors of `produce` are those of the request."""

    def __init__(self, produce: Callable[[], Awaitable[Response]]) -> None:
        """Respond with what `produce` returns, which is called once."""
        super().__init__()
        self._produce = produce

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Release the request's body, which its caller has parsed, and send the answer when there is one."""
        release_body(scope)
        response = await self._produce()
        del self._produce  # it holds the parsed request, for which a client that reads slowly has no use
        await response(scope, receive, send)
