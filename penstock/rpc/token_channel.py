"""A channel that sends the required token with every call.

gRPC interceptors would give each call its own task, which costs a busy router more than the rest of the call. Call
credentials would need TLS.
"""

from collections.abc import Callable, Iterable
from typing import Any

import grpc.aio

from penstock.rpc.access import token_of
from penstock.runtime.security import Security

Metadata = Iterable[tuple[str, str | bytes]]


class TokenChannel(grpc.aio.Channel):
    """Wraps a channel and adds `authorization: Bearer <token>` to every call."""

    def __init__(self, channel: grpc.aio.Channel, security: Security) -> None:
        """Wrap `channel`; `security` holds the tokens."""
        self._channel = channel
        self._security = security

    def _with_token(self, path: str, method: Callable[..., Any]) -> Any:
        token = token_of(path, self._security)
        ours = grpc.aio.Metadata(*((("authorization", f"Bearer {token}"),) if token else ()))

        def call(*arguments: Any, metadata: Metadata = (), **options: Any) -> Any:
            return method(*arguments, metadata=grpc.aio.Metadata(*ours, *metadata) if metadata else ours, **options)

        return call

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Return a method with one request and one response."""
        return self._with_token(method, self._channel.unary_unary(method, *arguments, **options))

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Return a method with one request and many responses."""
        return self._with_token(method, self._channel.unary_stream(method, *arguments, **options))

    def stream_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Return a method with many requests and one response."""
        return self._with_token(method, self._channel.stream_unary(method, *arguments, **options))

    def stream_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Return a method with many requests and many responses."""
        return self._with_token(method, self._channel.stream_stream(method, *arguments, **options))

    async def __aenter__(self) -> "TokenChannel":
        """Return the channel itself."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close the channel."""
        await self._channel.close(None)

    async def close(self, grace: float | None = None) -> None:
        """Close the channel; running calls are cancelled after `grace` seconds."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the connection."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Return when the state has changed."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Return when the channel is connected."""
        await self._channel.channel_ready()
