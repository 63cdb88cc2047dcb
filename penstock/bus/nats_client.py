"""One connection to a nats-server: access, error mapping, and a clean close."""

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client

from penstock.bus.cluster.keeper import kept_connected
from penstock.bus.failures import BUS_ERRORS, NO_LEADER, require_open
from penstock.config import BusConfig
from penstock.errors import AccessError, SetupError
from penstock.runtime.process import beside, end_task
from penstock.runtime.security import NATS_TOKEN, TOKEN, Security

log = structlog.get_logger()

_REFUSED = "Authorization Violation"
"""nats-server's answer to a client without the right token."""
_REFUSAL = f"token missing or wrong; set {NATS_TOKEN}, or {TOKEN} where both are the same"
_CLOSE_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 5.0
_RETRY_S = 0.5
_LOOK_EVERY_S = 1.0
_CLIENT_TASKS = ("_reconnection_task", "_reading_task", "_ping_interval_task", "_flusher_task")
"""The tasks that keep a connection of nats-py alive."""


@asynccontextmanager
async def connected_client(
    config: BusConfig, security: Security, *, stream: str, timeout_s: float
) -> AsyncIterator[Client]:
    """Yield a connected client, which reconnects without limit until the context ends: of several servers, to the next.

    Of a cluster it leaves a server that does not reach the leader of `stream`. If the server closes the connection for
    good, the context's body is cancelled: it would wait for ever.

    Raises:
        AccessError: the server refuses the token.
        SetupError: no server answers within `timeout_s`, or it has no JetStream.
        UnavailableError: the server has closed the connection for good.
    """
    if not config.servers:
        raise SetupError(
            "bus.url is empty; start a server with `penstock serve nats` and give --bus.url=nats://host:4222"
        )
    client = Client()
    was_admitted = False
    last_error: Exception = TimeoutError()

    async def on_error(error: Exception) -> None:
        nonlocal last_error
        last_error = error
        log.debug("bus.failed", error=str(error) or type(error).__name__)
        if _REFUSED in str(error):
            if not was_admitted:
                raise AccessError(f"bus.url = {config.url!r}: {_REFUSAL}")  # ends the first try to connect
            log.warning("bus.refused", url=config.url, reason=_REFUSAL)

    async def on_disconnect() -> None:
        if not client.is_closed:
            log.warning("bus.disconnected", url=config.url)

    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close_quietly, client)
        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(
                    random.sample(config.servers, len(config.servers)),
                    name="penstock",
                    dont_randomize=True,  # a server that is left is the last to be tried again
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=1,
                    connect_timeout=2,
                    ping_interval=10,
                    error_cb=on_error,
                    disconnected_cb=on_disconnect,
                    token=_token_for(client, security),
                    tls=None if security.tls is None else security.tls.client_context(),
                    tls_hostname=None if security.tls is None else security.tls.server_name or None,
                )
                was_admitted = True
                await stack.enter_async_context(kept_connected(client, config, stream=stream))
                await stack.enter_async_context(beside(_stay_open(client, config)))
                await _require_jetstream(client, config)
        except nats.js.errors.Error as error:
            said = getattr(error, "description", None)  # None: nobody answers for JetStream
            reason = f" ({said})" if said else ""
            raise SetupError(
                f"bus.url = {config.url!r}: the server there offers no JetStream{reason}; start it with `-js` or with "
                "a jetstream block in its configuration, or start one with `penstock serve nats`"
            ) from None
        except (TimeoutError, OSError, nats.errors.Error):
            reason = "no answer"
            if isinstance(last_error, ssl.SSLError | _PlainTextError):
                reason = f"no answer that TLS allows ({last_error})"
            raise SetupError(
                f"bus.url = {config.url!r}: {reason} within {timeout_s:g} s; correct the URL, or start a server there "
                "with `penstock serve nats`"
            ) from None
        yield client


async def _stay_open(client: Client, config: BusConfig) -> None:
    """Watch the connection.

    Raises:
        UnavailableError: the server has closed it for good.
    """
    while True:
        require_open(client, config.url)
        await asyncio.sleep(_LOOK_EVERY_S)


async def _require_jetstream(client: Client, config: BusConfig) -> None:
    """Return if JetStream answers; wait while a cluster has no leader.

    Raises:
        nats.js.errors.Error: it is not enabled.
        nats.errors.Error: there is no answer.
    """
    while True:
        try:
            await client.jetstream(timeout=_ANSWER_TIMEOUT_S).account_info()
            return
        except BUS_ERRORS as error:
            is_silent = not isinstance(error, nats.js.errors.Error)
            if not config.is_cluster or not (is_silent or getattr(error, "err_code", None) == NO_LEADER):
                raise
        await asyncio.sleep(_RETRY_S)


def _token_for(client: Client, security: Security) -> Callable[[], str] | None:
    """Return a callback for nats-py to get the token, which is the last moment to check for TLS."""
    if security.tls is None and not security.nats_token:
        return None

    def token() -> str:
        if security.tls is not None and not client._server_info.get("tls_required"):
            raise _PlainTextError(
                "the server speaks plain text, and [security] asks for TLS; switch it on at the server"
            )
        return security.nats_token

    return token


class _PlainTextError(nats.errors.Error):
    """The server speaks plain text; nats-py would go on and send it the token."""


async def _close_quietly(client: Client) -> None:
    """Close the client, even if the server is gone; unacked messages are delivered again to others."""
    # `close` forgets the subscriptions, and without a server it fails before it has ended their tasks.
    tasks: list[asyncio.Task[None] | None] = [each._wait_for_msgs_task for each in client._subs.values()]
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await client.close()
    except (TimeoutError, OSError, nats.errors.Error):
        log.debug("bus.close_failed")
    except asyncio.CancelledError:  # nats-py cancels its own tasks, and may be hit by that itself
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        log.debug("bus.close_failed")
    while alive := [task for task in [*tasks, *_tasks_of(client)] if task is not None and not task.done()]:
        client._status = Client.CLOSED  # otherwise one of its tasks may start to reconnect when the connection breaks
        for task in alive:
            await end_task(task)


def _tasks_of(client: Client) -> list[asyncio.Task[None] | None]:
    own = asyncio.current_task()
    tasks: list[asyncio.Task[None] | None] = [getattr(client, name) for name in _CLIENT_TASKS]
    return [task for task in tasks if task is not own]
