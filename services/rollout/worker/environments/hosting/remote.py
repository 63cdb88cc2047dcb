"""Environments behind a URL, as the worker sees them: one POST per request, to the episode's own path.

    POST   /v1/episodes/{id}    a request of `hosting.messages`, answered by its reply
    DELETE /v1/episodes/{id}    the end

The worker makes the ids, so that it can end an episode whose first reply was lost. No request is sent twice, except the
first one when no episode began: either the connection was refused, or the server had no room, in which case the code
that begins episodes sends it again.
"""

import asyncio
import random
import ssl
import uuid
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import httpx
import structlog

from penstock.environments import Task
from penstock.errors import (
    AccessError,
    EnvironmentFailedError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from penstock.runtime.security import ENVIRONMENT_TOKEN, Security, read_secret
from services.rollout.worker.environments.hosting import messages
from services.rollout.worker.environments.hosting.hosted import HostedEnvironment
from services.rollout.worker.environments.hosting.messages import AnyReply, AnyRequest, ResetRequest

log = structlog.get_logger()

_CLOSE_TIMEOUT_S = 8.0
"""Longer than the server has to close the episode, which it breaks off when its caller leaves."""
_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0
_HAS_NO_ROOM = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
_SHOWN_BYTES = 500


class RemoteEnvironments:
    """Makes environments that a server plays. Close it after use."""

    def __init__(self, name: str, url: str, *, remote_name: str, security: Security) -> None:
        """Use the environment `remote_name` of the server at `url`; rows call it `name`."""
        self._name = name
        self._remote_name = remote_name
        self._url = url.rstrip("/")
        self._security = security
        self._client: httpx.AsyncClient | None = None

    def __call__(self) -> HostedEnvironment:
        """Return the environment of one episode, which begins at reset."""
        return HostedEnvironment(self._open, name=self._remote_name)

    async def start(self) -> None:
        """Read the token and the certificates; the server may start later.

        Raises:
            ConfigError: the token cannot be read.
        """
        if self._client is None:
            token = read_secret(ENVIRONMENT_TOKEN)
            self._client = httpx.AsyncClient(
                timeout=None,  # each call is cancelled by the episode's deadline
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                trust_env=False,  # use the configured URL, whatever proxies the environment names
                headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {}),
                verify=await asyncio.to_thread(_tls_context, self._security),
            )

    async def stop(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _open(self, task: Task) -> "_HttpChannel":
        await self.start()
        assert self._client is not None
        return _HttpChannel(self._client, f"{self._url}/v1/episodes/{uuid.uuid4().hex}", self._url, task)


class _HttpChannel:
    """Connection to one episode at a server."""

    def __init__(self, client: httpx.AsyncClient, url: str, server: str, task: Task) -> None:
        self._client = client
        self._url = url
        self._server = server
        self._task = task

    async def exchange(self, request: AnyRequest) -> AnyReply:
        data = await self._begin(request) if isinstance(request, ResetRequest) else await self._post(request)
        return messages.decode_reply(data)

    async def end(self, number: int, *, is_idle: bool) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                async with self._client.stream("DELETE", self._url):
                    pass  # its answer is not read
        except (TimeoutError, httpx.HTTPError, OSError) as error:
            log.debug("environment.end_unconfirmed", server=self._server, error=repr(error))  # it expires there

    async def _begin(self, request: ResetRequest) -> bytes:
        """Post `request` until a server takes it, for as long as the episode has time.

        Raises:
            UnavailableError: no connection could be made.
            OverloadedError: the server has no room.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._post(request)
            except UnavailableError as error:
                if self._task.remaining_s() < 2 * pause_s:
                    raise
                log.debug("environment.begin_retried", server=self._server, reason=str(error))
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(_MAX_PAUSE_S, 2 * pause_s)

    async def _post(self, request: AnyRequest) -> bytes:
        what = str(request.__struct_config__.tag)
        content, headers = messages.encode(request), {"Content-Type": "application/json"}
        try:
            async with self._client.stream("POST", self._url, content=content, headers=headers) as response:
                data = await _read(response.aiter_raw(), what)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UnavailableError(f"its server {self._server} cannot be reached: {error}") from None
        except (httpx.HTTPError, OSError, ssl.SSLError) as error:
            raise EnvironmentFailedError(
                f"its server {self._server} broke off during {what}: {type(error).__name__}: {error}"
            ) from None
        if response.status_code == HTTPStatus.OK:
            return data
        said = f"{response.status_code}: {data[:_SHOWN_BYTES].decode(errors='replace')}"
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            raise AccessError(
                f"the environments' server {self._server} refused this worker; set {ENVIRONMENT_TOKEN} to its token"
            )
        if isinstance(request, ResetRequest) and response.status_code in _HAS_NO_ROOM:
            raise OverloadedError(f"its server {self._server} has no room: it answered {said}")
        if isinstance(request, ResetRequest) and response.status_code == HTTPStatus.UNPROCESSABLE_ENTITY:
            raise InvalidRequestError(f"its server {self._server} cannot play it: it answered {said}")
        raise EnvironmentFailedError(f"its server {self._server} answered {what} with {said}")


async def _read(parts: AsyncIterator[bytes], what: str) -> bytes:
    data = bytearray()
    async for part in parts:
        data += part
        if len(data) > messages.MAX_MESSAGE_BYTES:
            raise EnvironmentFailedError(
                f"it answered {what} with more than {messages.MAX_MESSAGE_BYTES} bytes; send fewer or smaller images"
            )
    return bytes(data)


def _tls_context(security: Security) -> ssl.SSLContext:
    """Return the context for https, with the public authorities and those of [security]."""
    context: Any = httpx.create_ssl_context(trust_env=False)
    assert isinstance(context, ssl.SSLContext)
    if security.tls is not None and security.tls.ca_file is not None:
        context.load_verify_locations(security.tls.ca_file)
    if security.tls is not None and security.tls.certificate_file is not None:
        context.load_cert_chain(security.tls.certificate_file, security.tls.key_file)
    return context
