"""Moves a client to another server of a cluster when its own one is frozen or cut off from the others.

nats-py notices only a closed connection, and a frozen server after half a minute. A server that lost its routes to the
majority still accepts clients, but can neither store nor deliver anything for them.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from nats.aio.client import Client

from penstock.bus.failures import BUS_ERRORS, describe
from penstock.config import BusConfig
from penstock.runtime.process import end_task

log = structlog.get_logger()

_EVERY_S = 1.0
_TIMEOUT_S = 2.0
_OF_ACK_WAIT = 0.5
"""Share of `bus.ack_wait_s` after which the server is left: before the messages in hand go to other processes."""


@asynccontextmanager
async def kept_in_cluster(client: Client, config: BusConfig) -> AsyncIterator[None]:
    """Keep the client, during the context, on a server that reaches the cluster's leader. One server: do nothing."""
    if not config.is_cluster:
        yield
        return
    keeping = asyncio.create_task(_keep(client, patience_s=config.ack_wait_s * _OF_ACK_WAIT))
    try:
        yield
    finally:
        await end_task(keeping)


async def _keep(client: Client, *, patience_s: float) -> None:
    jetstream = client.jetstream(timeout=_TIMEOUT_S)
    answered_at, moved = time.monotonic(), (0, 0)
    while True:
        await asyncio.sleep(_EVERY_S)
        if not client.is_connected:
            answered_at = time.monotonic()
            continue
        before, moved = moved, _bytes_on_their_way(client)
        try:
            await jetstream.account_info()
        except BUS_ERRORS as error:
            # The question waits behind a large message, which may take a slow link longer than the patience.
            if any(now and now != earlier for now, earlier in zip(moved, before, strict=True)):
                answered_at = time.monotonic()
            if time.monotonic() - answered_at >= patience_s and client.is_connected:
                log.warning("bus.server_left", url=_url_of(client), reason=describe(error))
                _abort(client)
                answered_at = time.monotonic()
        else:
            answered_at = time.monotonic()


def _url_of(client: Client) -> str:
    return "" if client.connected_url is None else client.connected_url.netloc


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
