"""Calls to a name with several addresses, as a service with several pods has, asked of a real DNS server."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from penstock.clients import RewardClient
from penstock.rpc.server import RpcServer
from penstock.runtime.ports import free_ports
from penstock.v1 import reward_pb2, reward_pb2_grpc
from tests.support.waiting import HANG_S, until

_A_RECORD = 1


class Names(asyncio.DatagramProtocol):
    """A DNS server: every name has `addresses` (IPv4)."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        ends = data.index(b"\0", 12) + 5
        (kind,) = struct.unpack(">H", data[ends - 4 : ends - 2])
        found = self.addresses if kind == _A_RECORD else []
        header = data[:2] + struct.pack(">HHHHH", 0x8580, 1, len(found), 0, 0)
        records = b"".join(
            b"\xc0\x0c" + struct.pack(">HHIH", _A_RECORD, 1, 0, 4) + bytes(map(int, address.split(".")))
            for address in found
        )
        self._transport.sendto(header + data[12:ends] + records, addr)


class Counting(reward_pb2_grpc.RewardServiceServicer):
    """Counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def ListProfiles(self, request: Any, context: Any) -> reward_pb2.ListProfilesResponse:  # noqa: N802 - the contract's name
        self.num_calls += 1
        return reward_pb2.ListProfilesResponse()


@asynccontextmanager
async def counting(host: str, port: int, *, max_connection_age_s: float) -> AsyncIterator[Counting]:
    """A server that wants its callers to connect anew after `max_connection_age_s`."""
    server, servicer = RpcServer(host=host, port=port, max_connection_age_s=max_connection_age_s), Counting()
    server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, servicer, "penstock.v1.RewardService")
    await server.start()
    yield servicer
    await server.drain(0.0)


@asynccontextmanager
async def named(*, max_connection_age_s: float) -> AsyncIterator[tuple[Names, list[Counting], Callable[[], Any]]]:
    """Three servers, of which a name has the first two; and a function by which a client of the name calls it once."""
    (port,) = free_ports(1)
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(Names, local_addr=("127.0.0.1", 0))
    dns = transport.get_extra_info("sockname")[1]
    try:
        async with AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(
                    counting(f"127.0.0.{n}", port, max_connection_age_s=max_connection_age_s)
                )
                for n in (1, 2, 3)
            ]
            names.addresses = ["127.0.0.1", "127.0.0.2"]
            client = await stack.enter_async_context(RewardClient(f"dns://127.0.0.1:{dns}/reward.test:{port}"))
            yield names, servers, lambda: client.list_profiles(timeout_s=HANG_S)
    finally:
        transport.close()


async def until_all_have_calls(servers: list[Counting], call: Callable[[], Any]) -> None:
    """Call until each of the servers was called."""

    async def all_have_calls() -> bool:
        await call()
        return all(server.num_calls for server in servers)

    await until(all_have_calls)


async def test_a_reward_client_calls_all_services_of_a_name() -> None:
    """In turn."""
    async with named(max_connection_age_s=10 * HANG_S) as (_, servers, call):
        await until_all_have_calls(servers[:2], call)
        for server in servers:
            server.num_calls = 0
        for _ in range(20):
            await call()
        assert sorted(server.num_calls for server in servers) == [0, 10, 10]


async def test_a_reward_client_calls_services_that_are_added_to_a_name() -> None:
    """A service that comes while the client is connected gets its share."""
    async with named(max_connection_age_s=1.0) as (names, servers, call):
        await until_all_have_calls(servers[:2], call)
        names.addresses.append("127.0.0.3")
        await until_all_have_calls(servers, call)
