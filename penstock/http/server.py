"""Runs an HTTP server on the event loop of the gRPC server, with one mapping of errors and an orderly drain.

While it drains, a server answers 503 to every new request, including health checks; running requests may finish within
the grace period. A client that disconnects cancels its request.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp, Scope

from penstock.errors import SetupError
from penstock.http.boundary import Boundary
from penstock.http.status import ErrorBodyMaker, error_body
from penstock.runtime.security import Security

log = structlog.get_logger()

_BACKLOG = 4096
_KEEP_ALIVE_S = 75
"""Longer than most clients keep an idle connection (aiohttp: 15 s), so that they close it first."""


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers, which belong to the process, and with an event that is set at its start."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()


class HttpServer:
    """One HTTP server: `start` it, and at the end `drain` it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        key: str = "port",
        max_body_bytes: int = 64 * 2**20,
        body_wait_s: float = 0.0,
        make_error_body: ErrorBodyMaker = error_body,
        security: Security | None = None,
        name_of_key: Callable[[Scope], str] = lambda scope: "",
        wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    ) -> None:
        """Serve `app` on `host`:`port`; port 0 takes any free one.

        Args:
            app: The application; it raises the errors of `penstock.errors`.
            host: Address to listen on.
            port: Port to listen on.
            key: The setting that holds the port, for example router.http_port.
            max_body_bytes: A larger body is answered 413. All bodies together may hold twice as much, from their first
                byte until they are answered or released (`penstock.http.body.release_body`); a body that does not
                fit is answered 429.
            body_wait_s: Seconds that a large body waits for room before that.
            make_error_body: Makes the JSON of errors that the application never sees, such as 401, from status and
                message.
            security: Token and certificates; None reads them from the environment.
            name_of_key: Names the key that admits a request as the token does (`Security.key_of`); empty: none does.
            wrap: Puts an application around everything, admission included.

        Raises:
            ConfigError: TLS is on without a certificate for servers.
        """
        self._host = host
        self._port = port
        self._key = key
        self._security = security or Security.from_environment()
        self._boundary = Boundary(
            app,
            max_body_bytes=max_body_bytes,
            body_wait_s=body_wait_s,
            make_error_body=make_error_body,
            security=self._security,
            name_of_key=name_of_key,
        )
        self._config = uvicorn.Config(
            wrap(self._boundary),
            log_config=None,
            access_log=False,
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            **_tls_options(self._security),
        )
        self._server: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Start serving and return the port.

        Raises:
            SetupError: the port is in use, the host is not one of this machine's, or a certificate is gone.
        """
        try:
            listener = socket.create_server((self._host, self._port), backlog=_BACKLOG)
        except OSError as error:
            raise SetupError(
                f"{self._key}: cannot listen on {self._host}:{self._port}: {error.strerror}; choose another port, or 0 "
                "for any that is free"
            ) from None
        # Accepted sockets inherit TCP_NODELAY. asyncio sets it only for listeners with proto TCP, and `create_server`
        # leaves proto 0. Without it, uvicorn's head and body arrive 40 ms apart on a kept-alive connection.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._port = listener.getsockname()[1]
        self._server = _Uvicorn(self._config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        started = asyncio.create_task(self._server.has_started.wait())
        await asyncio.wait({started, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        if not self._server.has_started.is_set():
            started.cancel()
            listener.close()
            reason, self._serving = self._serving.exception(), None
            raise SetupError(f"the server at {self.url} did not start: {reason}") from reason
        log.info("server.started", address=self.url)
        self._security.tell_if_open(self._host, self.url)
        return self._port

    def set_serving(self, serving: bool) -> None:
        """Set whether new requests are served; otherwise each gets 503, including health checks."""
        self._boundary.is_serving = serving

    async def drain(self, grace_s: float) -> None:
        """Answer new requests with 503, let running ones finish for `grace_s` seconds, then cancel the rest."""
        if self._server is None or self._serving is None:
            return
        self.set_serving(False)
        await self._boundary.drain(grace_s)
        self._server.should_exit = True
        await self._serving
        log.info("server.stopped", address=self.url)

    @property
    def address(self) -> str:
        """host:port, valid after `start`."""
        return f"{self._host}:{self._port}"

    @property
    def url(self) -> str:
        """http or https://host:port, valid after `start`."""
        return f"{'http' if self._security.tls is None else 'https'}://{self.address}"


def _tls_options(security: Security) -> dict[str, Any]:
    tls = security.tls
    if tls is None:
        return {}
    tls.require_certificate()
    options: dict[str, Any] = {"ssl_certfile": tls.certificate_file, "ssl_keyfile": tls.key_file}
    if tls.mutual:
        options |= {"ssl_ca_certs": str(tls.ca_file), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options
