"""Clients that are given a replica by the router and then talk to it themselves."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator

import pytest

from penstock.bus.connection import Bus
from penstock.clients import RouterClient
from penstock.clients.routed import RoutedGenerateClient
from penstock.errors import (
    DeadlineError,
    InvalidRequestError,
    MissingImageError,
    OverloadedError,
    PoisonError,
    UnavailableError,
)
from penstock.rpc.channel import connect as connect_channel
from penstock.testing.answers import FIRST_ID
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.testing.simulated_process import simulated_process
from penstock.v1 import common_pb2, generate_pb2, router_pb2, router_pb2_grpc
from services.router.config import RouterConfig
from services.router.server import routing
from services.router.tuning import Tuning
from tests.support.deadlines import long_enough
from tests.support.router.routers import configured
from tests.support.waiting import HANG_S, promptly, until

CLOSED, OPEN = router_pb2.BREAKER_STATE_CLOSED, router_pb2.BREAKER_STATE_OPEN


@contextlib.asynccontextmanager
async def routed(bus: Bus, **settings) -> AsyncIterator[tuple[RoutedGenerateClient, RouterClient]]:
    """A client at a router, and another that lists what the router sees."""
    config, tuning = configured(**settings)
    async with (
        routing(config, bus, tuning=tuning) as server,
        RouterClient(server.address) as router,
        RoutedGenerateClient(server.address) as client,
    ):
        yield client, router


def request(num_tokens: int = 8, *, session: str = "s", **fields) -> generate_pb2.GenerateRequest:
    sampling = generate_pb2.SamplingParams(max_new_tokens=num_tokens)
    return generate_pb2.GenerateRequest(
        request_id="r", session_id=session, input_ids=[5, 6], sampling=sampling, **fields
    )


async def num_in_flight(router: RouterClient) -> int:
    return sum(each.num_in_flight for each in (await router.list_replicas()).replicas)


async def until_idle(router: RouterClient) -> None:
    async def is_idle() -> bool:
        return await num_in_flight(router) == 0

    await until(is_idle)


async def until_routable(router: RouterClient, count: int) -> None:
    async def is_routable() -> bool:
        return sum(each.routable for each in (await router.list_replicas()).replicas) == count

    await until(is_routable)


async def test_an_image_that_is_not_stored_is_no_failure_of_the_replica(steady_bus: Bus) -> None:
    """The client reports none to the router."""
    async with (
        SimulatedEngine(steady_bus, error=MissingImageError("store it again")).running(),
        routed(steady_bus, breaker={"failures": 1}) as (client, router),
    ):
        await until_routable(router, 1)
        with pytest.raises(MissingImageError, match="store it again"):
            await client.generate(request(), timeout_s=HANG_S)
        await until_idle(router)
        assert [each.breaker for each in (await router.list_replicas()).replicas] == [CLOSED]


async def test_a_turn_is_played_by_the_replica_that_the_router_names(bus: Bus) -> None:
    """As through the router: sessions stay, spread, and count as in flight until the slot is released."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(SimulatedEngine(bus, replica_id=f"r{n}", hang_after=1).running())
            for n in range(2)
        ]
        client, router = await stack.enter_async_context(routed(bus))
        await until_routable(router, 2)
        playing = [asyncio.create_task(client.generate(request(session=f"s{n}"), timeout_s=HANG_S)) for n in range(6)]
        await until(lambda: sum(engine.num_running for engine in engines) == 6)
        assert [each.num_in_flight for each in (await router.list_replicas()).replicas] == [3, 3]
        for engine in engines:
            engine.released.set()
        first = [answer.replica_id for answer in await asyncio.gather(*playing)]
        await until_idle(router)
        again = [(await client.generate(request(session=f"s{n}"), timeout_s=HANG_S)).replica_id for n in range(6)]
        assert again == first
        assert [engine.num_streams for engine in engines] == [6, 6]


async def test_a_stream_gives_each_token_as_it_comes(steady_bus: Bus) -> None:
    """One chunk per token, and what is left early is given back and cancelled in the engine."""
    async with SimulatedEngine(steady_bus, token_s=0.01).running() as engine, routed(steady_bus) as (client, router):
        chunks = [chunk async for chunk in client.stream(request(4), timeout_s=HANG_S)]
        assert [list(chunk.output_ids) for chunk in chunks] == [[FIRST_ID + n] for n in range(4)]
        assert chunks[-1].finish_reason == generate_pb2.FINISH_REASON_LENGTH
        async with contextlib.aclosing(client.stream(request(1000), timeout_s=60.0)) as leaving:
            await anext(leaving)
        await until(lambda: engine.num_cancelled == 1)
        await until_idle(router)


async def test_a_turn_whose_replica_is_killed_goes_on_elsewhere_from_its_tokens(bus: Bus, run_name: str) -> None:
    """kill -9 in mid-stream: the caller gets the answer of an unbroken turn, and no token was produced twice."""
    async with (
        simulated_process(bus, run_name, "a-victim", token_s=0.02, hang_after=30) as victim,
        routed(bus) as (client, router),
    ):
        await until_routable(router, 1)
        parts: list[generate_pb2.GenerateChunk] = []

        async def play() -> None:
            async for chunk in client.stream(request(60), timeout_s=30.0):
                parts.append(chunk)

        playing = asyncio.create_task(play())
        await until(lambda: len(parts) >= 5)
        async with SimulatedEngine(bus, replica_id="b-heir").running() as heir:
            await until_routable(router, 2)
            victim.send_signal(signal.SIGKILL)
            await promptly(playing)
            assert [token for part in parts for token in part.output_ids] == list(range(FIRST_ID, FIRST_ID + 60))
            assert parts[-1].usage == generate_pb2.Usage(num_prompt_tokens=2, num_output_tokens=60)
            assert {part.replica_id for part in parts} == {"a-victim", "b-heir"}
            [rest] = heir.requests
            assert 5 <= len(rest.input_ids) - 2 < 60
            assert rest.request_id == "r#1"
            await until_idle(router)


async def test_the_router_hears_what_became_of_a_slot(steady_bus: Bus) -> None:
    """Failures open the breaker, though the router saw none of them."""
    async with (
        SimulatedEngine(steady_bus, replica_id="a-bad", error=UnavailableError("crashed")).running(),
        SimulatedEngine(steady_bus, replica_id="b-good", delay_s=0.05).running() as good,
        routed(steady_bus, balancing="round_robin") as (client, router),
    ):
        await until_routable(router, 2)
        for n in range(6):
            assert (await client.generate(request(session=f"s{n}"), timeout_s=HANG_S)).replica_id == "b-good"
        assert (await router.list_replicas()).replicas[0].breaker == OPEN
        await until(lambda: good.num_answered == 6)


async def test_replicas_that_cannot_be_reached_cost_no_attempt(steady_bus: Bus) -> None:
    """Leases of dead engines, more of them than attempts."""
    async with contextlib.AsyncExitStack() as stack:
        for n in range(5):
            dead = await stack.enter_async_context(SimulatedEngine(steady_bus, replica_id=f"a{n}").running())
            await dead.stop_serving()
        await stack.enter_async_context(SimulatedEngine(steady_bus, replica_id="b").running())
        client, router = await stack.enter_async_context(routed(steady_bus, balancing="round_robin"))
        await until_routable(router, 6)
        assert (await client.generate(request(), timeout_s=20.0)).replica_id == "b"


async def test_a_full_replica_is_left_alone_for_a_moment(steady_bus: Bus) -> None:
    """RESOURCE_EXHAUSTED sends the turn to another; with no other it is tried again until there is a slot."""
    async with (
        SimulatedEngine(steady_bus, error=OverloadedError("full")).running() as engine,
        routed(steady_bus) as (client, router),
    ):
        playing = asyncio.create_task(client.generate(request(), timeout_s=HANG_S))
        await until(lambda: engine.num_calls >= 2)
        engine.error = None
        assert (await playing).replica_id == engine.replica_id
        assert engine.num_calls < 20
        await until_idle(router)


async def test_what_can_never_succeed_is_not_tried_again(steady_bus: Bus) -> None:
    """INVALID_ARGUMENT is the caller's, and says nothing against the replica."""
    error = InvalidRequestError("id 9 is too large")
    async with SimulatedEngine(steady_bus, error=error).running() as engine, routed(steady_bus) as (client, router):
        for _ in range(4):
            with pytest.raises(InvalidRequestError, match="id 9 is too large"):
                await client.generate(request(), timeout_s=HANG_S)
        assert engine.num_calls == 4
        await until_idle(router)
        assert (await router.list_replicas()).replicas[0].routable


async def test_a_turn_that_breaks_replicas_is_given_up(steady_bus: Bus) -> None:
    """After three in a row that delivered nothing."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                SimulatedEngine(steady_bus, replica_id=f"r{n}", error=UnavailableError("crashed")).running()
            )
            for n in range(5)
        ]
        client, router = await stack.enter_async_context(routed(steady_bus))
        await until_routable(router, 5)
        with pytest.raises(PoisonError, match="given up after 3 replicas failed"):
            await client.generate(request(), timeout_s=HANG_S)
        assert sum(engine.num_calls for engine in engines) == 3


async def test_a_retry_goes_on_from_what_was_delivered(steady_bus: Bus) -> None:
    """With retry_until, also when nobody was there for a while."""
    async with routed(steady_bus, wait_for_replica_s=0.2) as (client, router):
        async with SimulatedEngine(steady_bus, replica_id="first", fail_after=3).running() as first:
            await until_routable(router, 1)
            playing = asyncio.create_task(
                client.generate(request(10), timeout_s=20.0, retry_until=time.monotonic() + 20.0)
            )
            await until(lambda: first.num_calls >= 1)
        async with SimulatedEngine(steady_bus, replica_id="second").running():
            answer = await playing
    assert list(answer.output_ids) == list(range(FIRST_ID, FIRST_ID + 10))
    assert answer.usage.num_output_tokens == 10


async def test_no_token_comes_twice_whatever_a_stream_breaks_off_with(steady_bus: Bus) -> None:
    """RESOURCE_EXHAUSTED after tokens: the next replica goes on from them."""
    error = OverloadedError("calm down")
    async with (
        SimulatedEngine(steady_bus, fail_after=3, fail_with=error).running(),
        routed(steady_bus) as (client, router),
    ):
        chunks = [chunk async for chunk in client.stream(request(5), timeout_s=HANG_S)]
        assert [token for chunk in chunks for token in chunk.output_ids] == list(range(FIRST_ID, FIRST_ID + 5))
        await until_idle(router)


async def test_a_replica_that_delivered_tokens_is_well(steady_bus: Bus) -> None:
    """A probe whose caller leaves with the last chunk, or before, closes the breaker."""
    async with (
        SimulatedEngine(steady_bus, error=UnavailableError("crashed")).running() as engine,
        routed(steady_bus, breaker={"failures": 1, "open_s": 0.1}) as (client, router),
    ):
        await until_routable(router, 1)
        for leave_at in (1, 4):
            engine.error = UnavailableError("crashed")
            with pytest.raises(PoisonError):
                await client.generate(request(), timeout_s=HANG_S)
            assert (await router.list_replicas()).replicas[0].breaker == OPEN
            engine.error = None
            async with contextlib.aclosing(client.stream(request(4), timeout_s=HANG_S)) as chunks:
                for _ in range(leave_at):
                    await anext(chunks)
            await until_idle(router)
            assert (await router.list_replicas()).replicas[0].breaker == router_pb2.BREAKER_STATE_CLOSED


async def test_a_turn_that_is_cancelled_leaves_no_slot_behind(steady_bus: Bus) -> None:
    """Whenever that is: while it waits for a slot, while the answer streams, and later."""
    async with SimulatedEngine(steady_bus, max_running=1000).running(), routed(steady_bus) as (client, router):
        await until_routable(router, 1)
        await client.generate(request(), timeout_s=HANG_S)
        for number in range(200):
            playing = asyncio.create_task(client.generate(request(), timeout_s=60.0))
            for _ in range(number):  # each is cancelled at another step of its call
                await asyncio.sleep(0)
            playing.cancel()
        await until_idle(router)


async def test_a_client_that_closes_while_turns_run_releases_their_slots(bus: Bus) -> None:
    """As when a script ends with an error in the middle of its calls."""
    async with SimulatedEngine(bus, token_s=0.05).running() as engine, routed(bus) as (_, router):
        await until_routable(router, 1)
        async with RoutedGenerateClient(router.address) as leaving:
            playing = [asyncio.create_task(leaving.generate(request(1000), timeout_s=60.0)) for _ in range(4)]
            await until(lambda: engine.num_running == 4)
        await until_idle(router)
        await until(lambda: engine.num_running == 0)
        outcomes = await asyncio.gather(*playing, return_exceptions=True)
        assert all(isinstance(each, BaseException) for each in outcomes)


async def test_the_deadline_holds_for_all_of_it(bus: Bus) -> None:
    """Routing, generating and retrying elsewhere share one deadline, and the slot is released."""
    async with SimulatedEngine(bus, delay_s=600.0).running() as engine, routed(bus) as (client, router):
        await until_routable(router, 1)

        async def play(timeout_s: float) -> None:
            with pytest.raises(DeadlineError):
                await client.generate(request(), timeout_s=timeout_s)

        await long_enough(play, lambda: engine.num_calls)
        await until(lambda: engine.num_cancelled == engine.num_calls)
        await until_idle(router)


async def test_a_slot_that_is_never_released_ends_by_its_time(bus: Bus) -> None:
    """A client that died does not hold a slot for ever; a late release frees nothing of the next client's."""
    async with (
        SimulatedEngine(bus, max_running=1).running(),
        routing(RouterConfig(), bus) as server,
        connect_channel(server.address) as channel,
        RouterClient(server.address) as router,
    ):
        stub = router_pb2_grpc.RouterServiceStub(channel)
        await until_routable(router, 1)
        began = time.monotonic()
        route = await stub.Route(router_pb2.RouteRequest(ttl_s=0.5), timeout=HANG_S)
        await stub.Route(router_pb2.RouteRequest(ttl_s=HANG_S), timeout=HANG_S)  # waits for the first to end
        assert time.monotonic() - began >= 0.5
        await stub.ReleaseRoute(router_pb2.ReleaseRouteRequest(route_id=route.route_id), timeout=HANG_S)
        assert await num_in_flight(router) == 1


async def test_no_client_holds_a_slot_for_longer_than_the_router_allows(bus: Bus) -> None:
    """Whatever time it asks for."""
    async with (
        SimulatedEngine(bus).running(),
        routing(RouterConfig(), bus, tuning=Tuning(route_ttl_s=0.5)) as server,
        connect_channel(server.address) as channel,
        RouterClient(server.address) as router,
    ):
        await until_routable(router, 1)
        request = router_pb2.RouteRequest(ttl_s=1e6)
        await router_pb2_grpc.RouterServiceStub(channel).Route(request, timeout=HANG_S)
        await until_idle(router)


async def test_a_drained_replicas_sessions_go_on_elsewhere(steady_bus: Bus) -> None:
    """Drained through the router, with no grace: turns that run go on with the other from their tokens."""
    async with contextlib.AsyncExitStack() as stack:
        leaving = await stack.enter_async_context(
            SimulatedEngine(steady_bus, replica_id="leaving", hang_after=1).running()
        )
        client, router = await stack.enter_async_context(routed(steady_bus))
        await until_routable(router, 1)
        playing = [asyncio.create_task(client.generate(request(50, session=f"s{n}"), timeout_s=30.0)) for n in range(4)]
        await until(lambda: leaving.num_running == 4)
        staying = await stack.enter_async_context(SimulatedEngine(steady_bus, replica_id="staying").running())
        await until_routable(router, 2)
        draining = asyncio.create_task(router.drain_replica("leaving", grace_s=0.3, timeout_s=HANG_S))
        await until(lambda: leaving._handing_over)
        leaving.released.set()
        assert await draining == router_pb2.RouterServiceDrainReplicaResponse(num_handed_over=4)
        for answer in await asyncio.gather(*playing):
            assert list(answer.output_ids) == list(range(FIRST_ID, FIRST_ID + 50))
            assert answer.replica_id == "staying"
        assert all(len(rest.input_ids) > 2 for rest in staying.requests)
        states = {each.replica.replica_id: each.replica.state for each in (await router.list_replicas()).replicas}
        assert states["leaving"] == common_pb2.REPLICA_STATE_DRAINING
        with pytest.raises(InvalidRequestError, match=r"'nobody'.* no replica of this id.* leaving, staying"):
            await router.drain_replica("nobody", grace_s=0.0, timeout_s=HANG_S)
