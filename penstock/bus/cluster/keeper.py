"""Keeps a client connected: it leaves a silent connection, and in a cluster a server that is frozen or cut off.

nats-py notices only a closed connection, and a frozen server after half a minute. Before it connects again, it closes
the old connection. asyncio sends what is buffered there first, so the close never ends if the other side takes nothing.
A server that lost its routes to the majority still accepts clients, but can neither store nor deliver anything for
them, and may not know it for 20 s (`penstock.bus.cluster.majority`).
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from penstock.bus.cluster.majority import ALONE_S, silence_s
from penstock.bus.failures import BUS_ERRORS, describe
from penstock.config import BusConfig
from penstock.runtime.process import end_task

log = structlog.get_logger()

_EVERY_S = 1.0
_STUCK_S = 2.0
"""Seconds without a byte sent after which a connection that is being closed is broken off."""
_TIMEOUT_S = 2.0
_OF_ACK_WAIT = 0.5
"""Share of `bus.ack_wait_s` after which the server is left: before the messages in hand go to other processes."""


@asynccontextmanager
async def kept_connected(client: Client, config: BusConfig, *, stream: str) -> AsyncIterator[None]:
    """Keep the client connected during the context: of a cluster, to a server that reaches the leader of `stream`.

    That leader must reach a majority. Until the stream is made, and if single servers store streams, the cluster's own
    leader takes its place.
    """
    patience_s = max(config.ack_wait_s * _OF_ACK_WAIT, ALONE_S) if config.is_cluster else math.inf
    jetstream = client.jetstream(timeout=_TIMEOUT_S)

    async def ask() -> float:
        if config.replicas == 1:
            await jetstream.account_info()
            return 0.0
        try:
            return silence_s((await jetstream.stream_info(stream)).cluster)
        except NotFoundError:  # says the cluster's leader
            return 0.0

    keeping = asyncio.create_task(_keep(client, ask, patience_s=patience_s))
    keeping.add_done_callback(_log_failure)
    try:
        yield
    finally:
        await end_task(keeping)


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("bus.keeping_failed", exc_info=error)


async def _keep(client: Client, ask: Callable[[], Awaitable[float]], *, patience_s: float) -> None:
    """Keep the client connected; `ask` returns how long ago the leader that answers heard from a majority."""
    works_at, moved = time.monotonic(), (0, 0)
    unsent, sent_at = 0, time.monotonic()
    while True:
        await asyncio.sleep(_EVERY_S)
        before, unsent = unsent, _bytes_of_closing(client)
        if unsent == 0 or unsent != before:
            sent_at = time.monotonic()
        elif time.monotonic() - sent_at >= _STUCK_S:
            log.warning("bus.connection_left", num_bytes_unsent=unsent)
            _abort(client)
            sent_at = time.monotonic()
        if not client.is_connected or math.isinf(patience_s):
            works_at = time.monotonic()
            continue
        earlier, moved = moved, _bytes_on_their_way(client)
        reason = "no leader reaches a majority of the servers"
        try:
            if (silent_s := await ask()) < math.inf:
                works_at = time.monotonic() - silent_s  # also before this connection: a server that is alone is left
        except BUS_ERRORS as error:
            reason = describe(error)
            # The question waits behind a large message, which may take a slow link longer than the patience.
            if any(now and now != then for now, then in zip(moved, earlier, strict=True)):
                works_at = time.monotonic()
        if time.monotonic() - works_at >= patience_s and client.is_connected:
            log.warning("bus.server_left", url=_url_of(client), reason=reason)
            _abort(client)
            works_at = time.monotonic()


def _url_of(client: Client) -> str:
    return "" if client.connected_url is None else client.connected_url.netloc


def _bytes_of_closing(client: Client) -> int:
    """Return the bytes that the connection wants to send before it closes; 0 if it is not being closed."""
    writer = getattr(client._transport, "_io_writer", None)
    if writer is None or not writer.transport.is_closing():
        return 0
    try:
        return int(writer.transport.get_write_buffer_size())
    except AttributeError:  # of TLS, once it is closed
        return 0


def _bytes_on_their_way(client: Client) -> tuple[int, int]:
    """Return the bytes that wait to be sent, and those that have arrived of an incomplete message."""
    writer = getattr(client._transport, "_io_writer", None)
    outgoing = 0 if writer is None else writer.transport.get_write_buffer_size()
    return outgoing, len(client._ps.buf)


def _abort(client: Client) -> None:
    """Break the connection, upon which the client goes to the next server.

    nats-py's own `force_reconnect` first sends what is buffered, which a frozen server never takes.
    """
    writer = getattr(client._transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()
