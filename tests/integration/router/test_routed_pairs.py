"""Clients that get a PD pair from the router and call both peers themselves."""

import asyncio
import contextlib
import signal

import pytest

from penstock.bus.connection import Bus
from penstock.errors import InvalidRequestError, OverloadedError, PromptTooLongError
from penstock.rpc.channel import connect
from penstock.testing.answers import FIRST_ID
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.testing.simulated_pd_pair import SimulatedDecode, SimulatedPrefill
from penstock.testing.simulated_process import simulated_process
from penstock.v1 import generate_pb2, router_pb2, router_pb2_grpc
from services.router.config import RouterConfig
from services.router.server import routing
from tests.integration.router.test_routed_client import num_in_flight, request, routed, until_idle, until_routable
from tests.support.waiting import HANG_S, promptly, until

CLOSED, OPEN = router_pb2.BREAKER_STATE_CLOSED, router_pb2.BREAKER_STATE_OPEN


async def test_a_turn_is_played_by_the_pair_that_the_router_names(steady_bus: Bus) -> None:
    """Both peers get one request, in one room; the prefill replica's slot is free when its part is done."""
    async with (
        SimulatedPrefill(steady_bus, replica_id="p").running() as p,
        SimulatedDecode(steady_bus, replica_id="d", token_s=0.02).running() as d,
        routed(steady_bus) as (client, router),
    ):
        await until_routable(router, 2)
        playing = asyncio.create_task(client.generate(request(30), timeout_s=HANG_S))
        await until(lambda: p.num_answered == 1)

        async def is_prefilled() -> bool:
            return [each.num_in_flight for each in (await router.list_replicas()).replicas] == [1, 0]

        await until(is_prefilled)
        assert not playing.done()
        answer = await playing
        assert list(answer.output_ids) == list(range(FIRST_ID, FIRST_ID + 30))
        assert answer.replica_id == "d"
        assert p.requests == d.requests
        await until_idle(router)
        async with contextlib.aclosing(client.stream(request(1000), timeout_s=60.0)) as leaving:
            await anext(leaving)
        await until(lambda: d.num_cancelled == 1)
        await until_idle(router)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_turn_whose_peer_is_killed_goes_on_with_another(bus: Bus, run_name: str, role: str) -> None:
    """A prefill replica before its part is done, a decode replica in mid-stream; its partner is used again."""
    is_prefill = role == "prefill"
    kind, other = (SimulatedPrefill, SimulatedDecode) if is_prefill else (SimulatedDecode, SimulatedPrefill)
    waits = {"pair_timeout_s": 30.0}
    async with (
        simulated_process(
            bus, run_name, "a-victim", role=role, delay_s=30.0 * is_prefill, token_s=0.02, hang_after=30
        ) as victim,
        other(bus, replica_id="stays", **waits).running() as stays,
        routed(bus) as (client, router),
    ):
        await until_routable(router, 2)
        parts: list[generate_pb2.GenerateChunk] = []

        async def play() -> None:
            async for chunk in client.stream(request(40), timeout_s=30.0):
                parts.append(chunk)

        playing = asyncio.create_task(play())
        await until(lambda: stays.num_running == 1 if is_prefill else len(parts) >= 5)
        async with kind(bus, replica_id="heir", **waits).running() as heir:
            await until_routable(router, 3)
            victim.send_signal(signal.SIGKILL)
            await promptly(playing)
            assert [token for part in parts for token in part.output_ids] == list(range(FIRST_ID, FIRST_ID + 40))
            await until(lambda: heir.num_answered == 1)
            assert len(set(stays.rooms)) == len(stays.rooms) == 2
            states = {each.replica.replica_id: each.breaker for each in (await router.list_replicas()).replicas}
            assert states["stays"] == CLOSED
            await until_idle(router)


async def test_a_peer_that_rejects_is_passed_over(steady_bus: Bus) -> None:
    """And only that one."""
    async with (
        SimulatedPrefill(steady_bus, replica_id="p").running() as p,
        SimulatedDecode(steady_bus, replica_id="a", error=OverloadedError("full")).running() as full,
        SimulatedDecode(steady_bus, replica_id="b").running() as free,
        routed(steady_bus) as (client, router),
    ):
        await until_routable(router, 3)
        assert (await client.generate(request(), timeout_s=HANG_S)).replica_id == "b"
        assert (full.num_calls, free.num_calls) == (1, 1)
        assert p.num_calls in (1, 2)  # both peers are called at once, and the first call may end before it is there
        await until_idle(router)


async def test_both_slots_of_a_pair_end_by_themselves(bus: Bus) -> None:
    """Each has a route of its own: given back one by one, or when their time is over."""
    async with (
        SimulatedPrefill(bus, replica_id="p").running(),
        SimulatedDecode(bus, replica_id="d").running(),
        routed(bus) as (_, router),
        routing(RouterConfig(), bus) as server,
        connect(server.address) as channel,
    ):
        del router
        stub = router_pb2_grpc.RouterServiceStub(channel)

        async def listed() -> list[router_pb2.RoutedReplica]:
            return list((await stub.ListReplicas(router_pb2.ListReplicasRequest(), timeout=HANG_S)).replicas)

        async def in_flight() -> int:
            return sum(each.num_in_flight for each in await listed())

        async def are_there() -> bool:
            return len(await listed()) == 2

        async def is_idle() -> bool:
            return await in_flight() == 0

        await until(are_there)
        route = await stub.Route(router_pb2.RouteRequest(ttl_s=HANG_S), timeout=HANG_S)
        assert (route.replica_id, route.prefill.replica_id) == ("d", "p")
        assert route.bootstrap.room > 0
        assert await in_flight() == 2
        for route_id, left in ((route.prefill.route_id, 1), (route.route_id, 0)):
            await stub.ReleaseRoute(router_pb2.ReleaseRouteRequest(route_id=route_id), timeout=HANG_S)
            assert await in_flight() == left
        await stub.Route(router_pb2.RouteRequest(ttl_s=0.3), timeout=HANG_S)
        await until(is_idle)


async def test_a_turn_that_has_outgrown_a_replica_goes_on_with_a_larger_one(steady_bus: Bus) -> None:
    """Also where only the replica itself knows that the turn is too long; one that nobody can hold fails."""
    large = SimulatedEngine(steady_bus, replica_id="large", fail_after=8)
    small = SimulatedEngine(steady_bus, replica_id="small", error=PromptTooLongError("too long"))
    large.replica.max_tokens, small.replica.max_tokens = 30, 20
    async with large.running(), routed(steady_bus, breaker={"failures": 100}) as (client, router):
        await until_routable(router, 1)
        parts = client.stream(request(16), timeout_s=20.0)
        await anext(parts)
        async with small.running():
            await until_routable(router, 2)
            left = [token async for part in parts for token in part.output_ids]
            assert len(left) == 15
            assert small.num_calls == 1
            with pytest.raises(InvalidRequestError, match="30 ids is too long: the largest replica takes 30 tokens"):
                await client.generate(
                    generate_pb2.GenerateRequest(
                        input_ids=[1] * 30, sampling=generate_pb2.SamplingParams(max_new_tokens=1)
                    ),
                    timeout_s=HANG_S,
                )
            await until_idle(router)
            assert await num_in_flight(router) == 0


@pytest.mark.slow
async def test_pushes_are_no_failures(steady_bus: Bus) -> None:
    """A turn that is broken off by more pushes than it may have failures is played to its end, and no breaker opens."""
    async with (
        SimulatedPrefill(steady_bus, replica_id="p").running() as p,
        SimulatedDecode(steady_bus, replica_id="d", token_s=0.01).running() as d,
        routed(steady_bus, breaker={"failures": 1}) as (client, router),
    ):
        await until_routable(router, 2)
        tokens: list[int] = []

        async def play() -> None:
            async for chunk in client.stream(request(2000), timeout_s=2 * HANG_S):
                tokens.extend(chunk.output_ids)

        playing = asyncio.create_task(play())
        before = 0
        for version in range(1, 15):
            await until(lambda: p.num_answered > before and d.num_running == 1)  # noqa: B023 - awaited
            before = p.num_answered
            for engine in (p, d):
                await engine.begin_push()
            await until(lambda: d.num_running == 0)
            for engine in (p, d):
                await engine.end_push(version)
        d.token_s = 0.0
        await promptly(playing)
        assert tokens == list(range(FIRST_ID, FIRST_ID + 2000))
        assert d.num_streams > 14
        assert [each.breaker for each in (await router.list_replicas()).replicas] == [CLOSED, CLOSED]
        await until_idle(router)
