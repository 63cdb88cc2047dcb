"""Connects every client."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from typing import Any, TypeVar

import grpc

from penstock.rpc.status import error_of
from penstock.rpc.token_channel import TokenChannel
from penstock.runtime.security import Security

MAX_MESSAGE_BYTES = 256 * 2**20
"""The largest gRPC message, for clients and servers: a long episode with many images fits."""

ResponseT = TypeVar("ResponseT")

_PING_TIMEOUT_MS = 10_000
"""A peer that does not answer a ping for as long has lost its calls. A process that shares a core with many others was
seen to take more than 5 s."""
_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),  # its default of 60 s would outlast keepalive_timeout
    ("grpc.http2.max_pings_without_data", 0),  # else pings stop during a long silent call
    ("grpc.enable_http_proxy", 0),
)

_SPREADING = (
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    ("grpc.dns_min_time_between_resolutions_ms", 5_000),  # of 30 s by default
)


def connect(address: str, security: Security | None = None, *, spread: bool = False) -> grpc.aio.Channel:
    """Return a channel to `address` (host:port). It connects at its first call and reconnects within a second.

    Its calls carry the tokens of `security` (None: those of the environment), over TLS if `security` has it.

    Args:
        address: The server.
        security: Tokens and TLS.
        spread: Send calls in turn to all addresses that the name has, for servers that keep nothing between calls. The
            name is asked again when a connection ends.
    """
    security = security or Security.from_environment()
    options = (*_OPTIONS, *_SPREADING) if spread else _OPTIONS
    if security.tls is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        tls = security.tls
        credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
        name = (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()
        channel = grpc.aio.secure_channel(address, credentials, options=(*options, *name))
    return TokenChannel(channel, security) if security.token or security.control_token else channel


async def connected(channel: grpc.aio.Channel, timeout_s: float) -> bool:
    """Connect if necessary; return whether the peer was reached: if so, a later failed call has reached it too."""
    state = channel.get_state(try_to_connect=True)
    if state is grpc.ChannelConnectivity.READY:
        return True
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while state not in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
                if state is grpc.ChannelConnectivity.READY:
                    return True
    return False


async def call(pending: Awaitable[ResponseT], *, peer: str) -> ResponseT:
    """Await a stub's call; raise a failure as the corresponding error of `penstock.errors`, naming `peer`."""
    try:
        return await pending
    except grpc.aio.AioRpcError as failure:
        raise error_of(failure, peer=peer) from None


async def stream(pending: grpc.aio.UnaryStreamCall[Any, ResponseT], *, peer: str) -> AsyncGenerator[ResponseT, None]:
    """Iterate over a stub's stream, as `call` awaits a call; leaving early cancels the call at the server."""
    try:
        async for response in pending:
            yield response
    except grpc.aio.AioRpcError as failure:
        raise error_of(failure, peer=peer) from None
    finally:
        pending.cancel()
