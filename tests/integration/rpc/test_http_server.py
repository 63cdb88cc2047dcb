"""The scaffold of every HTTP server, over real connections."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from fastapi import FastAPI, Request
from starlette.types import Message, Receive, Scope, Send

from penstock import errors
from penstock.http import boundary
from penstock.http.app import make_app
from penstock.http.boundary import Boundary
from penstock.http.server import HttpServer
from penstock.http.status import error_body
from penstock.runtime.process import end_task
from penstock.runtime.security import Security
from tests.support.certificates import make_certificates, security_of
from tests.support.sockets import options_of_accepted
from tests.support.waiting import HANG_S, promptly, until


@contextlib.asynccontextmanager
async def serving(
    handle: Callable[[], Awaitable[object]] | None = None, **settings: Any
) -> AsyncIterator[tuple[HttpServer, httpx.AsyncClient]]:
    """A server with /call, which runs `handle`, and /size, which reads its body."""
    app: FastAPI = make_app(title="test", description="", version="0")

    @app.get("/call")
    async def call() -> object:
        return await handle() if handle else "answer"

    @app.get("/healthz")
    async def healthz() -> str:
        return "serving"

    @app.post("/size")
    async def size(request: Request) -> int:
        return len(await request.body())

    @app.post("/sum")
    async def total(numbers: dict[str, float]) -> float:
        return sum(numbers.values())

    server = HttpServer(app, host="127.0.0.1", port=0, **settings)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{server.address}", timeout=10.0) as client:
            yield server, client
    finally:
        await server.drain(0.0)


async def test_answers_on_the_port_that_was_free() -> None:
    """And leaves one line per request in the log."""
    with structlog.testing.capture_logs() as logs:
        async with serving() as (server, client):
            assert not server.address.endswith(":0")
            response = await client.get("/call")
            assert (response.status_code, response.json()) == (200, "answer")
            await client.get("/nowhere")
    lines = [line for line in logs if line["event"] == "http.handled"]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("GET", "/call", 200),
        ("GET", "/nowhere", 404),
    ]
    assert {line["log_level"] for line in lines} == {"debug"}


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (errors.InvalidRequestError("m"), 422, "INVALID_REQUEST"),
        (errors.DataError("m"), 422, "INVALID_REQUEST"),
        (errors.NotReadyError("m"), 503, "UNAVAILABLE"),
        (errors.UnavailableError("m"), 503, "UNAVAILABLE"),
        (errors.OverloadedError("m"), 429, "OVERLOADED"),
        (errors.DeadlineError("m"), 504, "DEADLINE_EXCEEDED"),
        (TimeoutError("m"), 504, "DEADLINE_EXCEEDED"),
        (ValueError("m"), 500, "INTERNAL"),
    ],
)
async def test_an_error_crosses_the_wire(raised: Exception, status: int, code: str) -> None:
    """As a status, and a JSON body that says the same; who may come back is told when."""

    async def handle() -> None:
        raise raised

    async with serving(handle) as (_, client):
        response = await client.get("/call")
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.json()["error"]["message"].endswith("m")
    assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_unknown_pages_and_methods_are_errors_of_the_same_shape() -> None:
    """404, and 405 with the methods that there are."""
    async with serving() as (_, client):
        assert (await client.get("/nowhere")).json()["error"]["code"] == "NOT_FOUND"
        response = await client.delete("/call")
        assert (response.status_code, response.headers["allow"]) == (405, "GET")
        assert response.json()["error"]["code"] == "METHOD_NOT_ALLOWED"


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_the_limit_is_refused(chunked: bool) -> None:
    """With 413 and the limit, whether its size was declared or not; at the limit it is read."""
    async with serving(max_body_bytes=100_000) as (_, client):

        async def body(size: int) -> AsyncIterator[bytes]:
            for _ in range(size // 10_000):
                yield bytes(10_000)

        async def post(size: int) -> httpx.Response:
            return await client.post("/size", content=body(size) if chunked else bytes(size))

        assert (await post(100_000)).json() == 100_000
        response = await post(110_000)
        assert response.status_code == 413
        assert "larger than 100000 bytes" in response.json()["error"]["message"]
        assert (await client.get("/call")).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"a": 1, "b": 2}', 200, ""),
        (b"{", 400, "the body is not JSON: "),
        (b'{"a": NaN}', 400, "the body holds NaN, which is not a JSON number"),
        (b'{"a": -Infinity}', 400, "the body holds -Infinity"),
        (b'{"a": 1, "a": 2}', 400, "the body has 'a' twice"),
        (b'{"a": "\xff"}', 400, "the body is not UTF-8"),
        (b"[" * 100_000, 400, "the body is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", 400, "the body holds an integer of 5000 characters; send at most 100"),
        (b'{"\\ud800": 1, "b": "\\udfff"}', 422, "b = '\ufffd': "),
        (b"", 422, "the body is missing"),
    ],
)
async def test_json_is_read_with_care(body: bytes, status: int, message: str) -> None:
    """What is not JSON is refused with the reason; nothing that a client sends is an internal error."""
    async with serving() as (_, client):
        response = await client.post("/sum", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    if message:
        assert response.json()["error"]["message"].startswith(message)


async def test_accepted_connections_send_at_once() -> None:
    """Else the body of an answer waits for the client's delayed acknowledgement of its head: 40 ms on every request."""
    async with serving() as (server, client):
        await client.get("/call")
        assert options_of_accepted(int(server.address.split(":")[1]), socket.TCP_NODELAY) == [1]


async def test_a_health_check_is_answered_unread() -> None:
    """With GET and HEAD, in the midst of a body; other methods are requests like all others."""
    async with serving() as (server, client):
        for method in ("GET", "HEAD"):
            reader, writer = await asyncio.open_connection(*server.address.split(":"))
            writer.write(f"{method} /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n{{".encode())
            assert await promptly(reader.readline()) == b"HTTP/1.1 200 OK\r\n"
            writer.close()
        assert (await client.head("/healthz")).text == ""
        assert (await client.post("/healthz")).status_code == 405


async def test_the_boundarys_own_errors_have_the_form_that_the_application_promises() -> None:
    """413 comes before the application sees anything."""
    async with serving(max_body_bytes=10, make_error_body=lambda status, message: {"oops": status}) as (_, client):
        assert (await client.post("/size", content=bytes(11))).json() == {"oops": 413}


async def test_a_client_that_goes_away_cancels_its_handler() -> None:
    """At once, and no other."""
    begun, cancelled, release = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle() -> str:
        begun.set()
        try:
            await release.wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return "done"

    async with serving(handle) as (_, client):
        staying = asyncio.create_task(client.get("/call"))
        await begun.wait()
        begun.clear()
        leaving = asyncio.create_task(client.get("/call"))
        await begun.wait()
        leaving.cancel()
        await asyncio.wait((leaving,))
        await promptly(cancelled.wait())
        assert not staying.done()
        release.set()
        assert (await staying).json() == "done"


async def test_a_client_that_has_its_answer_is_not_gone() -> None:
    """Whatever a handler does after the end of its answer, it does to the end."""
    ended = asyncio.Event()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"done"})
        for _ in range(100):  # each lets the server's other tasks run
            await asyncio.sleep(0)
        ended.set()

    server = HttpServer(answer, host="127.0.0.1", port=0)
    await server.start()
    with structlog.testing.capture_logs() as logs:
        async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client:
            assert (await client.get("/call")).text == "done"
            await promptly(ended.wait())
        await server.drain(0.0)
    assert "http.abandoned" not in {line["event"] for line in logs}


async def test_draining_answers_what_runs_and_tells_others_to_come_back() -> None:
    """503 with Retry-After for every new request; the one that runs is answered."""
    begun, release = asyncio.Event(), asyncio.Event()

    async def handle() -> str:
        begun.set()
        await release.wait()
        return "done"

    async with serving(handle) as (server, client):
        running = asyncio.create_task(client.get("/call"))
        await begun.wait()
        draining = asyncio.create_task(server.drain(600.0))
        await asyncio.sleep(0)  # it has begun
        response = await client.get("/call")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert "stopping" in response.json()["error"]["message"]
        assert not draining.done()
        release.set()
        assert (await running).json() == "done"
        await promptly(draining)
        with pytest.raises(httpx.ConnectError):
            await client.get("/call")


async def test_draining_cancels_what_outlives_the_grace() -> None:
    """Its client is told that the server is stopping."""
    begun = asyncio.Event()

    async def handle() -> None:
        begun.set()
        await asyncio.Event().wait()

    async with serving(handle) as (server, client):
        running = asyncio.create_task(client.get("/call"))
        await begun.wait()
        await promptly(server.drain(0.3))
        assert (await running).status_code == 503


async def test_draining_does_not_wait_for_a_client_that_never_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the answer that the server is stopping cannot be sent to it."""
    monkeypatch.setattr(boundary, "_CANCEL_S", 0.0)
    begun = asyncio.Event()

    async def wait_for_ever(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def receive() -> Message:
        if not begun.is_set():
            return {"type": "http.request"}
        await asyncio.Event().wait()
        raise AssertionError

    stuck = Boundary(wait_for_ever, max_body_bytes=1, make_error_body=error_body, security=Security())
    scope = {"type": "http", "method": "GET", "path": "/call", "headers": []}
    request = asyncio.create_task(stuck(scope, receive, wait_for_ever))
    await begun.wait()
    stuck.is_serving = False
    await promptly(stuck.drain(0.0))
    await end_task(request)


async def test_a_certificate_that_is_gone_when_the_server_starts_is_a_setup_error(tmp_path: Path) -> None:
    """The start ends with the reason."""
    config = make_certificates(tmp_path)
    security = security_of(config)
    assert config.tls_cert is not None
    config.tls_cert.unlink()
    app = make_app(title="test", description="", version="0")
    server = HttpServer(app, host="127.0.0.1", port=0, security=security)
    with pytest.raises(errors.SetupError, match=r"did not start: .*No such file"):
        await promptly(server.start())


async def test_a_port_in_use_is_a_setup_error() -> None:
    """The message names setting, host, port and the remedy; the first server keeps its requests."""
    async with serving() as (server, client):
        second = HttpServer(FastAPI(), host="127.0.0.1", port=int(server.address.split(":")[1]), key="reward.http_port")
        with pytest.raises(
            errors.SetupError, match=rf"reward\.http_port: .*{server.address}.*in use.*choose another port, or 0"
        ):
            await second.start()
        assert (await client.get("/call")).status_code == 200


async def test_what_is_no_http_is_answered_400() -> None:
    """And closes its connection; the server goes on."""
    async with serving() as (server, client):
        host, port = server.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x00\x01\x02 nonsense\r\n\r\n")
        assert b"400" in await promptly(reader.read())
        writer.close()
        await until(lambda: writer.transport.is_closing())
        assert (await client.get("/call")).status_code == 200
