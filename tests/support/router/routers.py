"""A router over simulated engines, and what a worker is to it."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable

import grpc.aio
import pytest

from penstock.bus.connection import Bus
from penstock.rpc.channel import connect
from penstock.testing.answers import FIRST_ID
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.v1 import generate_pb2, generate_pb2_grpc, router_pb2, router_pb2_grpc
from services.router.config import RouterConfig
from services.router.server import routing
from services.router.tuning import BreakerTuning, LimitTuning, Tuning
from tests.support.waiting import HANG_S, until


class Caller:
    """Calls a router."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self.address = address
        self._generate = generate_pb2_grpc.GenerateServiceStub(channel)
        self.router = router_pb2_grpc.RouterServiceStub(channel)

    def generate(
        self, session: str = "", *, num_tokens: int = 4, version: int = 0, timeout_s: float = HANG_S, **fields
    ):
        """A unary call."""
        return self._generate.Generate(_request(session, num_tokens, version, fields), timeout=timeout_s)

    def stream(self, session: str = "", *, num_tokens: int = 4, version: int = 0, timeout_s: float = HANG_S, **fields):
        """A streaming one."""
        return self._generate.GenerateStream(_request(session, num_tokens, version, fields), timeout=timeout_s)

    async def replicas(self) -> router_pb2.ListReplicasResponse:
        """The pool as the router sees it."""
        return await self.router.ListReplicas(router_pb2.ListReplicasRequest(), timeout=HANG_S)

    async def until(self, condition: Callable[[router_pb2.ListReplicasResponse], bool]) -> None:
        """Wait until the router sees the pool so."""

        async def holds() -> bool:
            return condition(await self.replicas())

        await until(holds)

    async def until_routable(self, count: int) -> None:
        """Wait until this many replicas may be given calls."""
        await self.until(lambda pool: sum(each.routable for each in pool.replicas) == count)

    async def until_listed(self, replica_id: str) -> None:
        """Wait until the router has seen this replica; only then can it be drained."""
        await self.until(lambda pool: replica_id in {each.replica.replica_id for each in pool.replicas})


def _request(session: str, num_tokens: int, version: int, fields: dict) -> generate_pb2.GenerateRequest:
    fields = {"sampling": generate_pb2.SamplingParams(max_new_tokens=num_tokens)} | fields
    return generate_pb2.GenerateRequest(session_id=session, min_policy_version=version, **fields)


async def failure(pending) -> grpc.aio.AioRpcError:
    """What the call fails with; it must."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pending
    return caught.value


def ids(num_tokens: int) -> list[int]:
    """What a simulated engine answers with."""
    return list(range(FIRST_ID, FIRST_ID + num_tokens))


def configured(*, limit: dict | None = None, breaker: dict | None = None, **settings) -> tuple[RouterConfig, Tuning]:
    """A router's config and tuning."""
    names = {field.name for field in dataclasses.fields(Tuning)}
    constants = {name: settings.pop(name) for name in list(settings) if name in names}
    tuning = Tuning(limit=LimitTuning(**(limit or {})), breaker=BreakerTuning(**(breaker or {})), **constants)
    return RouterConfig(**({"wait_for_replica_s": 1.0} | settings)), tuning


@contextlib.asynccontextmanager
async def router(bus: Bus, **settings) -> AsyncIterator[Caller]:
    """A router that waits a second at most, unless told otherwise; `settings` are those of its config and tuning."""
    config, tuning = configured(**settings)
    async with routing(config, bus, grace_s=0.0, tuning=tuning) as server, connect(server.address) as channel:
        yield Caller(channel, server.address)


@contextlib.asynccontextmanager
async def pool(
    bus: Bus, count: int, *, engine: dict | None = None, **settings
) -> AsyncIterator[tuple[Caller, list[SimulatedEngine]]]:
    """A router and `count` engines r0, r1, ... that it knows."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(SimulatedEngine(bus, replica_id=f"r{index}", **(engine or {})).running())
            for index in range(count)
        ]
        caller = await stack.enter_async_context(router(bus, **settings))
        await caller.until_routable(count)
        yield caller, engines
