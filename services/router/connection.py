"""A channel to one replica, for calls whose bytes the router passes on without parsing."""

import grpc.aio

from penstock.rpc.channel import connect
from penstock.runtime.security import Security

_GENERATE = "/penstock.v1.GenerateService/Generate"
_GENERATE_STREAM = "/penstock.v1.GenerateService/GenerateStream"


class ReplicaConnection:
    """The peer that attempts call (`penstock.clients.stream_attempt.Peer`)."""

    def __init__(self, replica_id: str, address: str, security: Security) -> None:
        """Prepare the channel; it connects when first used, with the tokens and TLS of `security`."""
        self.address = address
        self.name = f"replica {replica_id} at {address}"
        """The replica's name in messages."""
        self.channel = connect(address, security)
        self._unary = self.channel.unary_unary(_GENERATE, None, None)  # bytes to bytes
        self._stream = self.channel.unary_stream(_GENERATE_STREAM, None, None)

    def generate(self, request: bytes, *, timeout_s: float) -> grpc.aio.UnaryUnaryCall[bytes, bytes]:
        """Start the unary call; cancelling it aborts the request in the engine."""
        return self._unary(request, timeout=timeout_s)

    def generate_stream(self, request: bytes, *, timeout_s: float) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
        """Start the streaming call."""
        return self._stream(request, timeout=timeout_s)

    async def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        await self.channel.close(None)
