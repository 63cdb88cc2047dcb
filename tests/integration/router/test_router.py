"""The router over engines that serve real gRPC and hold real leases."""

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from penstock.bus.connection import Bus, connect
from penstock.clients import GenerateClient
from penstock.config import BusConfig, RunConfig
from penstock.errors import (
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    PoisonError,
    SetupError,
    UnavailableError,
)
from penstock.records.published_version import CURRENT_KEY, POLICY_BUCKET, write_published_version
from penstock.rpc.channel import connect as connect_channel
from penstock.runtime.ports import free_ports
from penstock.runtime.security import Security
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.testing.simulated_process import simulated_process
from penstock.v1 import common_pb2, generate_pb2, router_pb2, router_pb2_grpc, trainer_pb2
from services.router.config import RouterConfig, RouterSettings
from services.router.server import routing, serve
from tests.support.deadlines import long_enough
from tests.support.router.routers import Caller, failure, pool, router
from tests.support.waiting import HANG_S, promptly, until

DRAINING = common_pb2.REPLICA_STATE_DRAINING
UPDATING = common_pb2.REPLICA_STATE_UPDATING
OPEN = router_pb2.BREAKER_STATE_OPEN


async def publish(bus: Bus, version: int, min_version: int) -> None:
    value = trainer_pb2.PublishedVersion(policy_version=version, min_policy_version=min_version)
    await (await bus.bucket(POLICY_BUCKET)).put(CURRENT_KEY, write_published_version(value))


async def test_a_call_passes_through_unchanged(steady_bus: Bus) -> None:
    """The engine sees the caller's request, and the caller the engine's answer."""
    async with pool(steady_bus, 1) as (caller, [engine]):
        answer = await caller.generate(
            "s",
            input_ids=[5, 6, 7],
            request_id="q",
            images=[common_pb2.Image(data=b"\x89PNG" * 500_000)],
            sampling=generate_pb2.SamplingParams(max_new_tokens=3, temperature=0.5),
        )
        assert list(answer.output_ids) == [1000, 1001, 1002]
        assert answer.replica_id == "r0"
        [request] = engine.requests
        assert list(request.input_ids) == [5, 6, 7]
        assert request.request_id == "q"
        assert request.images[0].data == b"\x89PNG" * 500_000
        assert request.sampling.temperature == 0.5


async def test_a_group_computes_its_prompt_once(steady_bus: Bus) -> None:
    """Its samples reach the engine when the first of them has a token; a sample of another group does not wait."""
    async with pool(steady_bus, 1, engine={"hang_after": 0}) as (caller, [engine]):
        answers = [asyncio.ensure_future(caller.generate(f"s{n}", group_id="g", input_ids=[5, 6])) for n in range(4)]
        await until(lambda: engine.num_calls == 1)
        answers.append(asyncio.ensure_future(caller.generate("other", group_id="h", input_ids=[5, 6])))
        await until(lambda: engine.num_calls == 2)
        await asyncio.sleep(0.1)
        assert engine.num_calls == 2
        engine.released.set()
        assert {answer.replica_id for answer in await promptly(asyncio.gather(*answers))} == {"r0"}
        assert engine.num_calls == 5


async def test_sessions_stay_and_spread(steady_bus: Bus) -> None:
    """Each session's turns go to one replica; the sessions share the replicas evenly."""
    async with pool(steady_bus, 3) as (caller, engines):
        first = [(await caller.generate(f"s{index}")).replica_id for index in range(9)]
        for _ in range(3):
            assert [(await caller.generate(f"s{index}")).replica_id for index in range(9)] == first
        assert [engine.num_calls for engine in engines] == [12, 12, 12]


async def test_a_call_whose_engine_is_killed_is_played_by_another(bus: Bus, run_name: str) -> None:
    """kill -9 in the middle of a call: the caller gets an answer of the other replica and no error."""
    async with simulated_process(bus, run_name, "a-victim", delay_s=30.0) as victim, router(bus) as caller:
        await caller.until_routable(1)
        pending = asyncio.ensure_future(caller.generate("s"))
        await caller.until(lambda pool: pool.replicas[0].num_in_flight == 1)
        async with SimulatedEngine(bus, replica_id="b-heir").running() as heir:
            await caller.until_routable(2)
            victim.send_signal(signal.SIGKILL)
            answer = await promptly(pending)
            assert answer.replica_id == "b-heir"
            assert heir.num_calls == 1
            assert (await caller.generate("s")).replica_id == "b-heir"


@pytest.mark.slow
async def test_killed_engines_leave_the_pool_within_seconds(bus: Bus, run_name: str) -> None:
    """One after the other is killed with -9; each is gone when its lease has ended, and calls go on all the while."""
    async with contextlib.AsyncExitStack() as stack:
        victims = [
            await stack.enter_async_context(simulated_process(bus, run_name, f"victim-{index}")) for index in range(3)
        ]
        survivor = await stack.enter_async_context(SimulatedEngine(bus, replica_id="survivor").running())
        caller = await stack.enter_async_context(router(bus))
        await caller.until_routable(4)
        for num_left, victim in zip((3, 2, 1), victims, strict=True):
            victim.send_signal(signal.SIGKILL)
            await asyncio.gather(*(caller.generate() for _ in range(8)))
            await caller.until(lambda pool, left=num_left: len(pool.replicas) == left)
        assert survivor.num_calls >= 8


async def test_waits_for_a_replica_and_then_uses_it(steady_bus: Bus) -> None:
    """A call that finds nobody is answered by the engine that comes a moment later."""
    async with router(steady_bus, wait_for_replica_s=HANG_S) as caller:
        pending = asyncio.ensure_future(caller.generate())
        await caller.until(lambda pool: pool.num_waiting == 1)
        async with SimulatedEngine(steady_bus, replica_id="late").running():
            assert (await promptly(pending)).replica_id == "late"


async def test_without_a_replica_a_call_fails_and_says_why(steady_bus: Bus) -> None:
    """After wait_for_replica_s: UNAVAILABLE, and what to do."""
    async with router(steady_bus, wait_for_replica_s=0.5) as caller:
        error = await failure(caller.generate())
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        waited = r"within \d+\.\d s: no replica is registered; start one with `penstock serve rollout`"
        assert re.search(waited, error.details() or "")


async def test_waiting_ends_before_the_callers_deadline(steady_bus: Bus) -> None:
    """A caller with little time learns the reason, not only that its deadline passed."""
    async with router(steady_bus, wait_for_replica_s=2 * HANG_S, time_to_answer_s=HANG_S) as caller:
        error = await failure(caller.generate(timeout_s=HANG_S + 0.5))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "no replica is registered" in (error.details() or "")


async def test_nothing_below_the_version_bound_is_used(steady_bus: Bus) -> None:
    """The published bound and the request's own hold, the higher of the two; a refusal names the versions."""
    async with pool(steady_bus, 2, wait_for_replica_s=0.4) as (caller, [old, new]):
        await new.update(policy_version=5)
        await caller.until(lambda pool: any(each.replica.policy_version == 5 for each in pool.replicas))
        await publish(steady_bus, 6, 4)
        await caller.until(lambda pool: pool.min_policy_version == 4)
        seen = await caller.replicas()
        assert seen.published_version == 6
        assert [(each.routable, each.unroutable_reason) for each in seen.replicas] == [
            (False, "below policy version"),
            (True, ""),
        ]
        assert {(await caller.generate(f"s{index}")).replica_id for index in range(6)} == {"r1"}
        error = await failure(caller.generate(version=6))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "all 2 replicas are below policy version 6 (newest 5)" in (error.details() or "")
        assert old.num_calls == 0


async def test_a_replica_that_turns_out_too_old_is_passed_over(bus: Bus) -> None:
    """FAILED_PRECONDITION (its lease named a newer version than it has) sends the call to another replica."""
    async with pool(bus, 2) as (caller, [first, second]):
        first.error = NotReadyError("policy version 3 < 4")
        assert [(await caller.generate("s")).replica_id for _ in range(2)] == ["r1", "r1"]
        assert first.num_calls == 1
        await until(lambda: second.num_answered == 2)  # counted after the answer was sent


async def test_a_full_replica_is_passed_over(steady_bus: Bus) -> None:
    """RESOURCE_EXHAUSTED sends the call to another; when all are full it waits for a slot."""
    async with pool(steady_bus, 2, wait_for_replica_s=HANG_S) as (caller, engines):
        engines[0].error = OverloadedError("queue full")
        assert (await caller.generate()).replica_id == "r1"
        engines[1].error = OverloadedError("queue full")
        pending = asyncio.ensure_future(caller.generate())
        await until(lambda: engines[1].num_calls == 3)  # asked again
        assert not pending.done()
        engines[0].error = None
        assert (await promptly(pending)).replica_id == "r0"


async def test_when_all_stay_full_the_caller_is_told(steady_bus: Bus) -> None:
    """RESOURCE_EXHAUSTED is returned if no slot became free in time."""
    async with pool(steady_bus, 2, wait_for_replica_s=0.5) as (caller, engines):
        for engine in engines:
            engine.error = OverloadedError("queue full")
        error = await failure(caller.generate())
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "queue full" in (error.details() or "")


async def test_an_invalid_request_is_not_tried_again(steady_bus: Bus) -> None:
    """INVALID_ARGUMENT is passed on with the engine's words."""
    async with pool(steady_bus, 2) as (caller, engines):
        for engine in engines:
            engine.error = InvalidRequestError("id 900 is outside the vocabulary")
        error = await failure(caller.generate())
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "id 900 is outside the vocabulary" in (error.details() or "")
        assert sum(engine.num_calls for engine in engines) == 1


async def test_bytes_that_are_no_request_are_invalid(steady_bus: Bus) -> None:
    """Garbage is refused by the router itself."""
    async with routing(RouterConfig(), steady_bus) as server, connect_channel(server.address) as channel:
        generate = channel.unary_unary("/penstock.v1.GenerateService/Generate")  # type: ignore[call-arg]
        error = await failure(generate(b"\xff\xff\xff", timeout=HANG_S))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_for_no_tokens_is_invalid(steady_bus: Bus) -> None:
    """Refused by the router itself, in the engine's words; streams too."""
    async with pool(steady_bus, 1) as (caller, [engine]):
        for sampling in (None, generate_pb2.SamplingParams(), generate_pb2.SamplingParams(max_new_tokens=-1)):
            for call in (caller.generate, caller.stream):
                pending = call(sampling=sampling)
                error = await failure(pending if call == caller.generate else pending.read())
                assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert "sampling.max_new_tokens = " in (error.details() or "")
        assert engine.num_calls == 0


async def test_a_request_that_breaks_replicas_is_given_up(steady_bus: Bus) -> None:
    """A call that max_attempts replicas took and failed does not go on to break the rest of the pool."""
    async with pool(steady_bus, 4, max_attempts=2) as (caller, engines):
        for engine in engines:
            engine.error = UnavailableError("crashed")
        error = await failure(caller.generate())
        assert error.code() == grpc.StatusCode.ABORTED
        assert "given up after 2 replicas failed" in (error.details() or "")
        assert sum(engine.num_calls for engine in engines) == 2


async def test_a_client_does_not_retry_what_breaks_replicas(steady_bus: Bus) -> None:
    """Within its retry time it would break all replicas, over and over; another call is answered as before."""
    async with pool(steady_bus, 4) as (caller, engines), GenerateClient(caller.address) as client:
        for engine in engines:
            engine.error = UnavailableError("crashed")
        sampling = generate_pb2.SamplingParams(max_new_tokens=4)
        request = generate_pb2.GenerateRequest(request_id="poison", sampling=sampling)
        with pytest.raises(PoisonError, match="given up after 3 replicas failed"):
            await client.generate(request, timeout_s=10.0, retry_until=time.monotonic() + 3600.0)
        assert sum(engine.num_calls for engine in engines) == 3
        for engine in engines:
            engine.error = None
        assert (await client.generate(request, timeout_s=10.0)).replica_id


async def test_replicas_that_cannot_be_reached_are_passed_over_however_many(steady_bus: Bus) -> None:
    """Leases of dead engines cost nobody a call, and do not count as attempts."""
    never = {"open_s": HANG_S, "max_open_s": HANG_S}
    async with pool(steady_bus, 5, max_attempts=1, breaker=never) as (caller, engines):
        for engine in engines[:4]:
            await engine.stop_serving()
        for _ in range(5):
            assert (await caller.generate()).replica_id == "r4"
        open_breakers = [each for each in (await caller.replicas()).replicas if each.breaker == OPEN]
        assert open_breakers
        assert {each.unroutable_reason for each in open_breakers} == {"failing or unreachable"}


async def test_cancelling_the_call_cancels_it_in_the_engine(steady_bus: Bus) -> None:
    """The engine stops computing for a caller that has left, and the slot is free again."""
    async with pool(steady_bus, 1) as (caller, [engine]):
        engine.delay_s = 30.0
        pending = caller.generate()
        await caller.until(lambda pool: pool.replicas[0].num_in_flight == 1)
        await until(lambda: engine.num_running == 1)
        pending.cancel()
        await caller.until(lambda pool: pool.replicas[0].num_in_flight == 0)
        await until(lambda: engine.num_cancelled == 1)
        assert engine.num_answered == 0


async def test_the_deadline_reaches_the_engine(steady_bus: Bus) -> None:
    """The engine is given what is left of the caller's time, and is cancelled when that has passed."""
    async with pool(steady_bus, 1) as (caller, [engine]):
        engine.delay_s = 600.0

        async def play(timeout_s: float) -> None:
            error = await failure(caller.generate(timeout_s=timeout_s))
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED

        timeout_s = await long_enough(play, lambda: any(engine.deadlines_s))
        await until(lambda: engine.num_cancelled == engine.num_calls)
        assert 0.0 < (engine.deadlines_s[-1] or 0.0) <= timeout_s + 0.02, "in steps of 10 ms, rounded up"


async def test_a_draining_replica_finishes_what_runs_and_gets_nothing_new(bus: Bus) -> None:
    """A session moves on, the call that runs is answered, also after the lease was given back."""
    async with (
        router(bus) as caller,
        SimulatedEngine(bus, replica_id="stays").running() as stays,
        SimulatedEngine(bus, replica_id="goes", delay_s=1.5).running() as goes,
    ):
        await stays.update(state=UPDATING)
        await caller.until(lambda pool: len(pool.replicas) == 2)
        await caller.until(lambda pool: pool.replicas[1].replica.state == UPDATING)
        pending = asyncio.ensure_future(caller.generate("s"))
        await until(lambda: goes.num_calls == 1)
        await goes.update(state=DRAINING)
        await caller.until(lambda pool: not pool.replicas[0].routable)
        assert (await caller.generate("s")).replica_id == "stays"
        assert goes._lease is not None
        await goes._lease._bucket.delete("goes")
        assert (await pending).replica_id == "goes"
        assert goes.num_cancelled == 0


async def test_two_routers_share_one_pool(bus: Bus, bus_config: BusConfig, run_name: str) -> None:
    """Each sees all replicas and sends to all; what engines report of the other's load counts."""
    async with (
        pool(bus, 2) as (caller, engines),
        connect(bus_config, run=run_name) as other_bus,
        router(other_bus) as other,
    ):
        await other.until_routable(2)
        for engine in engines:
            engine.delay_s = 0.3
        calls = [one.generate(f"{index}-{n}") for index, one in enumerate((caller, other)) for n in range(8)]
        await asyncio.gather(*calls)
        assert [engine.num_calls for engine in engines] == [8, 8]
        await engines[0].update(num_running=6, num_queued=2)
        await other.until(lambda pool: pool.replicas[0].replica.num_running == 6)
        assert {(await other.generate(f"late-{n}")).replica_id for n in range(4)} == {"r1"}


async def test_a_router_that_stops_lets_calls_finish(steady_bus: Bus) -> None:
    """Within the grace, a call that runs is answered."""
    async with (
        SimulatedEngine(steady_bus, replica_id="r", delay_s=0.5).running() as engine,
        contextlib.AsyncExitStack() as stack,
    ):
        serving = routing(RouterConfig(), steady_bus, grace_s=HANG_S)
        server = await serving.__aenter__()
        caller = Caller(await stack.enter_async_context(connect_channel(server.address)), server.address)
        await caller.until_routable(1)
        pending = asyncio.ensure_future(caller.generate())
        await until(lambda: engine.num_calls == 1)
        await serving.__aexit__(None, None, None)
        assert (await pending).replica_id == "r"


async def test_an_unreadable_lease_is_left_out(bus: Bus) -> None:
    """One broken entry does not hide the replicas beside it."""
    async with pool(bus, 1) as (caller, _):
        bucket = await bus.bucket("replicas", ttl_s=bus.config.lease_ttl_s)
        await bucket.put("broken", b"{")
        await bucket.put("other", b'{"replica_id": "not-other", "address": "127.0.0.1:1"}')
        async with SimulatedEngine(bus, replica_id="r1").running():
            await caller.until_routable(2)
            assert [each.replica.replica_id for each in (await caller.replicas()).replicas] == ["r0", "r1"]


@pytest.mark.slow
async def test_a_frozen_engine_loses_its_call_to_another(bus: Bus, run_name: str) -> None:
    """A process that neither answers nor closes its connection is noticed by keepalive, within 20 seconds or so."""
    async with simulated_process(bus, run_name, "a-frozen", delay_s=60.0) as frozen, router(bus) as caller:
        await caller.until_routable(1)
        pending = asyncio.ensure_future(caller.generate(timeout_s=60.0))
        await caller.until(lambda pool: pool.replicas[0].num_in_flight == 1)
        frozen.send_signal(signal.SIGSTOP)
        async with SimulatedEngine(bus, replica_id="b-heir").running():
            assert (await promptly(pending)).replica_id == "b-heir"


async def test_serves_a_recipe_until_told_to_stop(bus_config: BusConfig, run_name: str) -> None:
    """The entry point of `penstock serve router`: it stops in order, and a port in use is one line with the remedy."""
    async with local_port() as port:
        sections = {"bus": bus_config, "run": RunConfig(name=run_name)}
        with pytest.raises(SetupError, match=rf"router\.port: .*127\.0\.0\.1:{port}.*in use"):
            await serve(
                RouterSettings(router=RouterConfig(port=port), **sections), asyncio.Event(), security=Security()
            )
    stop = asyncio.Event()
    task = asyncio.create_task(
        serve(RouterSettings(router=RouterConfig(port=port), **sections), stop, security=Security())
    )
    async with connect_channel(f"127.0.0.1:{port}") as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        await stub.ListReplicas(router_pb2.ListReplicasRequest(), timeout=10.0, wait_for_ready=True)
    stop.set()
    await promptly(task)


@contextlib.asynccontextmanager
async def local_port() -> AsyncIterator[int]:
    """A port that is in use during the context."""
    server = await asyncio.start_server(lambda *streams: None, "127.0.0.1", free_ports(1)[0])
    async with server:
        yield server.sockets[0].getsockname()[1]
