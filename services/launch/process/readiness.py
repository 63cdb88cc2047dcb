"""Checks whether a process of the run is ready: gRPC servers by grpc.health.v1, nats-server by its greeting."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.bus.greeting import greeting_of
from penstock.rpc.channel import connect
from penstock.runtime.security import Security

_TIMEOUT_S = 2.0


async def serves_grpc(address: str, security: Security) -> bool:
    """Return whether the server at `address` (host:port) reports SERVING; `security` has the tokens for it."""
    async with connect(address, security) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def serves_nats(address: str) -> bool:
    """Return whether the nats-server at `address` greets clients, which it does before it asks for token or TLS."""
    host, _, port = address.rpartition(":")
    return await greeting_of(host, int(port)) is not None
