"""Wraps every HTTP application: admission, body limit, errors, cancellation, drain, metrics, one log line per request.

Invariants: the body of a request without the token is not read, and every such request gets the same answer. Only the
health page (GET, HEAD) needs no token; a request with its own key is also admitted by that key. The application gets a
complete body, and is cancelled when its client disconnects.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable

import structlog
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.http.body import Bodies, GoneError, HeldBody
from penstock.http.status import ErrorBodyMaker, error_body, headers_of, status_of
from penstock.runtime.security import REFUSAL, Security
from penstock.telemetry import metrics

log = structlog.get_logger()

_REQUESTS = metrics.counter(
    "penstock_http_requests_total",
    "HTTP requests that ended, by route and status; a status of 0 means that the client left before an answer.",
    ("route", "status"),
)
_REQUEST_SECONDS = metrics.histogram(
    "penstock_http_request_seconds",
    "Seconds from the start of an HTTP request to its end, streams included.",
    ("route",),
)

_HEALTH = "/healthz"
_CANCEL_S = 5.0
"""Seconds that cancelled requests may take to end while the server drains."""
_STOPPING = "this server is stopping; send the request to another server, or again later"


def error_response(status: int, message: str, make_body: ErrorBodyMaker = error_body) -> JSONResponse:
    """Return the response for an error."""
    return JSONResponse(make_body(status, message), status, headers=headers_of(status))


class Boundary:
    """An ASGI application around another one. It has the only broad `except` of the HTTP servers."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        body_wait_s: float = 0.0,
        make_error_body: ErrorBodyMaker,
        security: Security,
        name_of_key: Callable[[Scope], str] = lambda scope: "",
    ) -> None:
        self.is_serving = True
        self._app = app
        self._security = security
        self._name_of_key = name_of_key
        self._make_error_body = make_error_body
        self._bodies = Bodies(max_body_bytes, max_wait_s=body_wait_s)
        self._running: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Wait up to `grace_s` seconds for running requests, then cancel the rest and wait briefly for their end.

        A cancelled request still sends its answer, which a client that does not read can block for ever.
        """
        for limit_s in (grace_s, _CANCEL_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._idle.wait()
            for task in self._running:
                task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        started = time.monotonic()
        status = 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._answer(scope, receive, send_noting)
        finally:
            elapsed_s = time.monotonic() - started
            elapsed_ms = round(elapsed_s * 1000, 2)
            route = "refused" if status == 401 else _route_of(scope)
            _REQUESTS.labels(route, str(status)).inc()
            _REQUEST_SECONDS.labels(route).observe(elapsed_s)
            level = log.info if status == 401 else log.debug
            level("http.handled", method=scope["method"], path=scope["path"], status=status, elapsed_ms=elapsed_ms)

    def _admits(self, scope: Scope) -> bool:
        if not self._security.token or _asks_for_health(scope):
            return True
        authorization = next((value for key, value in scope["headers"] if key == b"authorization"), b"")
        return self._security.admits(authorization, key_name=self._name_of_key(scope))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._admits(scope):
            await self._refusal(401, REFUSAL)(scope, receive, send)
            return
        if not self.is_serving:
            await self._refusal(503, _STOPPING)(scope, receive, send)
            return
        if _asks_for_health(scope):
            # Health needs no token, so the body is not read. uvicorn omits the body of an answer to HEAD.
            await self._app({**scope, "method": "GET"}, _replayed(HeldBody(self._bodies)), send)
            return
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        self._idle.clear()
        try:
            await self._run(task, scope, receive, send)
        finally:
            self._running.discard(task)
            if not self._running:
                self._idle.set()

    def _refusal(self, status: int, message: str) -> JSONResponse:
        return error_response(status, message, self._make_error_body)

    async def _run(self, task: asyncio.Task[None], scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False
        client = _cancelled_when_gone(task, receive)

        async def send_noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)
            client.has_answer = message["type"] == "http.response.body" and not message.get("more_body", False)

        error: HTTPException | None = None
        try:
            async with self._bodies.whole(receive, declared_bytes=_declared_bytes(scope)) as body, client:
                body.offer_in(scope)
                await self._app(scope, _replayed(body), send_noting)
        except GoneError:
            log.info("http.abandoned", path=scope["path"])
        except asyncio.CancelledError:
            if self.is_serving:
                raise
            task.uncancel()
            error = HTTPException(503, _STOPPING)
        except HTTPException as raised:
            error = raised
        except (PenstockError, TimeoutError) as raised:
            error = HTTPException(status_of(raised), str(raised) or "the deadline passed")
        except Exception as raised:
            log.exception("http.crashed", path=scope["path"])
            error = HTTPException(500, f"{type(raised).__name__}: {raised}")
        if error is not None and not has_begun:
            response = self._refusal(error.status_code, str(error.detail))
            response.headers.update(error.headers or {})
            await response(scope, receive, send)


def _route_of(scope: Scope) -> str:
    """Return the pattern of the route that took the request, such as /v1/items/{item}; never the path itself."""
    return str(getattr(scope.get("route"), "path", None) or "other")


def _asks_for_health(scope: Scope) -> bool:
    return scope["path"] == _HEALTH and scope["method"] in ("GET", "HEAD")


def _declared_bytes(scope: Scope) -> int:
    """Return the body's size by its header, 0 without one."""
    declared = next((value for key, value in scope["headers"] if key == b"content-length"), b"")
    return int(declared) if declared.isdigit() else 0


def _replayed(body: HeldBody) -> Receive:
    """Return a `receive` whose first call returns the whole body; it holds no reference of its own to the bytes."""
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body.data, "more_body": False}
        await asyncio.Event().wait()  # a disconnect cancels the waiting task
        raise AssertionError

    return receive


class _cancelled_when_gone:  # noqa: N801 - used as a function, like asyncio.timeout
    """Cancel `task`, which runs this context, when the client disconnects; the context then raises GoneError.

    Once the client has its whole answer, the task ends on its own: servers report a disconnect then too.
    """

    def __init__(self, task: asyncio.Task[None], receive: Receive) -> None:
        self.has_answer = False
        self._task = task
        self._receive = receive
        self._is_gone = False

    async def __aenter__(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.has_answer:
            self._is_gone = True
            self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._watching.cancel()
        if self._is_gone and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise GoneError from None
