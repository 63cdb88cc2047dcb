"""Who is let in to an HTTP server, over real connections."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

import httpx
import pytest
import structlog

from penstock.config import SecurityConfig
from penstock.errors import ConfigError
from penstock.http.app import make_app
from penstock.http.server import HttpServer
from penstock.runtime.security import Security
from tests.support.certificates import security_of
from tests.support.strangers import TOKEN, WRONG, assert_http_is_closed
from tests.support.waiting import HANG_S, promptly

KNOWN = {"Authorization": f"Bearer {TOKEN}"}


@contextlib.asynccontextmanager
async def serving(security: Security) -> AsyncIterator[HttpServer]:
    app = make_app(title="test", description="", version="0")

    @app.get("/call")
    @app.get("/healthz")
    async def call() -> str:
        return "answer"

    server = HttpServer(app, host="127.0.0.1", port=0, security=security)
    await server.start()
    try:
        yield server
    finally:
        await server.drain(0.0)


async def test_a_caller_without_the_token_is_refused_and_learns_nothing() -> None:
    """Every page answers the same, the OpenAPI page and those that are not there too; only health is everybody's."""
    with structlog.testing.capture_logs() as logs:
        async with (
            serving(Security(token=TOKEN)) as server,
            httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client,
        ):
            await assert_http_is_closed(client, "/call")
            for shown in (f"Bearer {WRONG}", f"Basic {TOKEN}", TOKEN):
                await assert_http_is_closed(client, "/call", Authorization=shown)
            assert (await client.get("/healthz")).json() == "answer"
            assert (await client.get("/healthz/")).status_code == 401
            assert (await client.get("/call", headers=KNOWN)).json() == "answer"
            assert (await client.get("/openapi.json", headers=KNOWN)).status_code == 200
    assert TOKEN[:-1] not in repr(logs)
    assert {line["log_level"] for line in logs if line.get("status") == 401} == {"info"}


async def test_a_stranger_hears_nothing_of_a_server_that_stops() -> None:
    """Refused as before; who has the token hears that it stops."""
    async with (
        serving(Security(token=TOKEN)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client,
    ):
        server.set_serving(False)
        await assert_http_is_closed(client, "/call")
        assert (await client.get("/call", headers=KNOWN)).status_code == 503


@pytest.mark.parametrize("path", ["/call", "/healthz"])
async def test_a_refused_request_is_not_read(path: str) -> None:
    """The answer comes while the body has only begun; a health check that would have to be read is none."""
    async with serving(Security(token=TOKEN)) as server:
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n{{".encode())
        assert await promptly(reader.readline()) == b"HTTP/1.1 401 Unauthorized\r\n"
        writer.close()
        # One that sends all of it hears it as well.
        async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S) as client:
            assert (await client.post("/call", content=bytes(20 * 2**20))).status_code == 401


async def test_tls(certificates: SecurityConfig, other_certificates: SecurityConfig) -> None:
    """Who knows the authority is let in; plain text and another authority are not."""
    async with serving(security_of(certificates, token=TOKEN)) as server:
        assert server.url.startswith("https://")
        async with client_of(server, certificates.model_copy(update={"tls_cert": None, "tls_key": None})) as client:
            await assert_http_is_closed(client, "/call")
            assert (await client.get("/call", headers=KNOWN)).json() == "answer"
        async with client_of(server, other_certificates) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get("/call", headers=KNOWN)
        async with httpx.AsyncClient(base_url=f"http://{server.address}", timeout=HANG_S) as plain:
            with pytest.raises(httpx.RemoteProtocolError):
                await plain.get("/healthz")


async def test_mutual_tls(certificates: SecurityConfig, other_certificates: SecurityConfig) -> None:
    """Callers need a certificate of the same authority, for health too."""
    nameless = certificates.model_copy(update={"tls_cert": None, "tls_key": None})
    foreign = other_certificates.model_copy(update={"tls_ca": certificates.tls_ca})
    async with serving(security_of(certificates.model_copy(update={"mutual": True}))) as server:
        for stranger in (nameless, foreign):
            async with client_of(server, stranger) as client:
                with pytest.raises((httpx.TransportError, ssl.SSLError)):
                    await client.get("/healthz")
        async with client_of(server, certificates) as client:
            assert (await client.get("/call")).json() == "answer"


def client_of(server: HttpServer, config: SecurityConfig) -> httpx.AsyncClient:
    tls = security_of(config).tls
    assert tls is not None
    return httpx.AsyncClient(base_url=server.url, verify=tls.client_context(), timeout=HANG_S)


async def test_a_server_without_a_certificate_does_not_start(certificates: SecurityConfig) -> None:
    """Rather than in plain text, where the recipe asks for TLS."""
    security = security_of(certificates.model_copy(update={"tls_cert": None, "tls_key": None}))
    with pytest.raises(ConfigError, match=r"security\.tls_cert is not set"):
        HttpServer(make_app(title="test", description="", version="0"), host="127.0.0.1", port=0, security=security)
