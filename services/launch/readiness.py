"""Checks whether a process of the run is ready: gRPC servers by grpc.health.v1, nats-server by its greeting."""

import asyncio
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.rpc.channel import connect
from penstock.runtime.security import Security

_TIMEOUT_S = 2.0


async def serves_grpc(address: str, security: Security | None = None) -> bool:
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
    writer = None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            return (await reader.read(5)).startswith(b"INFO")
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
