"""The router when replicas die, fail, fill up, come and go."""

import asyncio
import collections
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from penstock.bus.connection import Bus, connect
from penstock.errors import NotReadyError, OverloadedError, UnavailableError
from penstock.rpc.channel import connect as connect_channel
from penstock.v1 import common_pb2, generate_pb2, generate_pb2_grpc, router_pb2
from tests.engine_processes import engine_process
from tests.routers import Caller, pool, router
from tests.simulated_engine import FIRST_ID, SimulatedEngine
from tests.waiting import until

CLOSED, OPEN, HALF_OPEN = (
    router_pb2.BREAKER_STATE_CLOSED,
    router_pb2.BREAKER_STATE_OPEN,
    router_pb2.BREAKER_STATE_HALF_OPEN,
)


def ids(num_tokens: int) -> list[int]:
    """What a simulated engine answers with."""
    return list(range(FIRST_ID, FIRST_ID + num_tokens))


async def failure(pending) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pending
    return caught.value


async def test_a_unary_call_goes_on_from_the_tokens_of_a_killed_replica(bus: Bus, run_name: str) -> None:
    """kill -9 in mid-answer: the caller gets the answer that an unbroken replica gives, and no second one is begun."""
    async with (
        SimulatedEngine(bus, replica_id="unbroken", policy_version=2).running() as unbroken,
        router(bus, chunk_tokens=4) as caller,
    ):
        await caller.until_routable(1)
        whole = await caller.generate("s", num_tokens=60, input_ids=[5, 6])
        await unbroken.update(state=common_pb2.REPLICA_STATE_DRAINING)
        async with engine_process(bus, run_name, "a-victim", token_s=0.02) as victim:
            await caller.until(lambda pool: pool.replicas[0].routable)
            pending = asyncio.ensure_future(caller.generate("s", num_tokens=60, input_ids=[5, 6], request_id="q"))
            await asyncio.sleep(0.5)
            async with SimulatedEngine(bus, replica_id="b-heir", policy_version=2).running() as heir:
                await caller.until_routable(2)
                victim.send_signal(signal.SIGKILL)
                answer = await asyncio.wait_for(pending, 10.0)
        [rest] = heir.requests
        num_delivered = len(rest.input_ids) - 2
        assert 4 <= num_delivered < 60
        assert rest.request_id == "q#1"
        assert list(rest.input_ids) == [5, 6, *ids(num_delivered)]
        assert rest.sampling.max_new_tokens == 60 - num_delivered
        spans = [(span.num_tokens, span.policy_version) for span in answer.version_spans]
        assert spans == [(num_delivered, 0), (60 - num_delivered, 2)]
        assert list(answer.output_ids) == list(whole.output_ids) == ids(60)
        assert answer.logprobs == whole.logprobs
        assert answer.finish_reason == whole.finish_reason
        assert answer.usage == whole.usage


async def test_a_stream_goes_on_from_the_tokens_of_a_killed_replica(bus: Bus, run_name: str) -> None:
    """Its chunks one after the other are the answer of an unbroken replica; only the last one ends it."""
    async with engine_process(bus, run_name, "a-victim", token_s=0.02) as victim, router(bus) as caller:
        await caller.until_routable(1)
        chunks: list[generate_pb2.GenerateChunk] = []

        async def play() -> None:
            async for chunk in caller.stream("s", num_tokens=60, input_ids=[5, 6]):
                chunks.append(chunk)

        playing = asyncio.create_task(play())
        await until(lambda: len(chunks) >= 5)
        async with SimulatedEngine(bus, replica_id="b-heir").running() as heir:
            await caller.until_routable(2)
            victim.send_signal(signal.SIGKILL)
            await asyncio.wait_for(playing, 10.0)
        assert [token for chunk in chunks for token in chunk.output_ids] == ids(60)
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [0] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == generate_pb2.FINISH_REASON_LENGTH
        assert chunks[-1].usage == generate_pb2.Usage(num_prompt_tokens=2, num_output_tokens=60)
        assert [chunk.HasField("usage") for chunk in chunks].count(True) == 2
        assert len(heir.requests) == 1


async def test_no_token_comes_twice_whatever_a_stream_breaks_off_with(bus: Bus) -> None:
    """RESOURCE_EXHAUSTED in mid-answer is no refusal: gRPC says so by itself of a stream that was reset."""
    for error in (OverloadedError("calm down"), NotReadyError("not any more")):
        async with pool(bus, 2, engine={"fail_after": 3, "fail_with": error}, chunk_tokens=1) as (caller, engines):
            assert list((await caller.generate(num_tokens=5)).output_ids) == ids(5)
            chunks = [chunk async for chunk in caller.stream(num_tokens=5)]
            assert [token for chunk in chunks for token in chunk.output_ids] == ids(5)
            assert sum(engine.num_calls for engine in engines) == 4


async def test_a_replica_that_delivered_tokens_is_no_try(bus: Bus) -> None:
    """Also with max_tries = 1, and also where nobody may wait in line: the call has been let in already."""
    async with pool(bus, 1, engine={"fail_after": 3}, max_tries=1, max_waiting=0, chunk_tokens=1) as (caller, _):
        assert list((await caller.generate(num_tokens=5)).output_ids) == ids(5)


async def test_a_call_gets_the_replica_that_can_be_reached_again(bus: Bus) -> None:
    """Within a moment, though it is the one that this very call could not reach."""
    async with pool(bus, 1, wait_for_replica_s=20.0, breaker={"open_s": 0.2, "max_open_s": 0.4}) as (caller, [engine]):
        await engine.stop_serving()
        pending = asyncio.ensure_future(caller.generate(timeout_s=30.0))
        await caller.until(lambda pool: pool.replicas[0].breaker == OPEN)
        await engine.serve_again()
        assert (await asyncio.wait_for(pending, 8.0)).replica_id == "r0"


async def test_a_pool_that_nobody_can_reach_is_given_up_in_time(bus: Bus) -> None:
    """wait_for_replica_s counts all waits of a call, those that ended with a probe too."""
    async with pool(bus, 1, wait_for_replica_s=1.0, breaker={"open_s": 0.2, "max_open_s": 0.2}) as (caller, [engine]):
        await engine.stop_serving()
        started = time.monotonic()
        error = await failure(caller.generate(timeout_s=30.0))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - started < 10.0


async def test_a_hasty_caller_says_nothing_against_a_slow_connection(bus: Bus) -> None:
    """Its time was up before the connection was there: no reason to keep others away."""
    stop = asyncio.Event()

    async def say_nothing(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await stop.wait()
        writer.close()

    async with pool(bus, 1) as (caller, [engine]):
        silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        await engine.update(address=address)
        await caller.until(lambda pool: pool.replicas[0].replica.address == address)
        for _ in range(5):
            assert (await failure(caller.generate(timeout_s=0.2))).code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await caller.until(lambda pool: pool.replicas[0].num_in_flight == 0)
        assert (await caller.replicas()).replicas[0].breaker == CLOSED
        stop.set()
        silent.close()
        await silent.wait_closed()


async def test_a_stream_that_is_left_is_cancelled_in_the_engine(bus: Bus) -> None:
    """And its place is free again."""
    async with pool(bus, 1, engine={"token_s": 0.01}) as (caller, [engine]):
        stream = caller.stream(num_tokens=1000)
        await stream.read()
        stream.cancel()
        await until(lambda: engine.num_cancelled == 1, timeout_s=5.0)
        await caller.until(lambda pool: pool.replicas[0].num_in_flight == 0)


async def test_progress_resets_the_count_of_tries_but_not_for_ever(bus: Bus) -> None:
    """Replicas that each break off after a token bring a short answer to its end; a long one is given up."""
    async with pool(bus, 3, engine={"fail_after": 1}, max_tries=2, chunk_tokens=1, breaker={"failures": 100}) as (
        caller,
        engines,
    ):
        answer = await caller.generate(num_tokens=4)
        assert list(answer.output_ids) == ids(4)
        assert sum(engine.num_calls for engine in engines) == 4
        error = await failure(caller.generate(num_tokens=40))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "given up after 8 replicas failed" in (error.details() or "")


async def test_calls_beyond_the_limit_wait_in_line(bus: Bus) -> None:
    """First come, first served, one place at a time; who cancels leaves the line, and all are answered."""
    limit = {"factor": 1.0}
    async with pool(bus, 1, engine={"max_running": 1, "delay_s": 0.05}, limit=limit) as (caller, [engine]):
        pending = []
        for index in range(10):
            pending.append(caller.generate(request_id=f"q{index}"))
            await caller.until(lambda pool, index=index: pool.num_waiting + pool.replicas[0].num_in_flight > 0)
            await asyncio.sleep(0.005)
        pending[6].cancel()
        await asyncio.gather(*(call for index, call in enumerate(pending) if index != 6))
        served = [request.request_id for request in engine.requests if request.request_id != "q6"]
        assert served == [f"q{index}" for index in range(10) if index != 6]
        assert (await caller.replicas()).num_waiting == 0
        assert (await caller.replicas()).replicas[0].num_in_flight == 0


async def test_a_full_line_turns_calls_away(bus: Bus) -> None:
    """RESOURCE_EXHAUSTED names the setting; those in line are answered, and then there is room again."""
    async with pool(bus, 1, engine={"max_running": 1, "delay_s": 0.4}, limit={"factor": 1.0}, max_waiting=2) as (
        caller,
        [engine],
    ):
        pending = [asyncio.ensure_future(caller.generate()) for _ in range(3)]
        await caller.until(lambda pool: pool.num_waiting == 2)
        error = await failure(caller.generate())
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "router.max_waiting = 2" in (error.details() or "")
        engine.delay_s = 0.0
        await asyncio.gather(*pending)
        await caller.generate()


async def test_who_waits_for_a_place_waits_until_the_deadline(bus: Bus) -> None:
    """wait_for_replica_s is for pools in which there is nobody; here somebody works, and the call hears so in time."""
    async with pool(
        bus, 1, engine={"max_running": 1, "delay_s": 1.5}, limit={"factor": 1.0}, wait_for_replica_s=0.2
    ) as (caller, _):
        first = asyncio.ensure_future(caller.generate())
        await caller.until(lambda pool: pool.replicas[0].num_in_flight == 1)
        patient, hasty = asyncio.ensure_future(caller.generate()), caller.generate(timeout_s=0.8)
        error = await failure(hasty)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the only replica is at the limit of calls" in (error.details() or "")
        assert list((await first).output_ids) == list((await patient).output_ids)


async def test_calls_that_wait_for_different_things_do_not_wait_for_each_other(bus: Bus) -> None:
    """One that wants a version that nobody has is passed by those that want less."""
    async with pool(bus, 1, engine={"max_running": 1, "delay_s": 0.05}, wait_for_replica_s=20.0) as (caller, [engine]):
        newest = asyncio.ensure_future(caller.generate("new", version=7))
        await caller.until(lambda pool: pool.num_waiting == 1)
        await asyncio.gather(*(caller.generate() for _ in range(5)))
        assert not newest.done()
        await engine.update(policy_version=7)
        assert (await asyncio.wait_for(newest, 5.0)).version_spans[0].policy_version == 7


async def test_the_breaker_opens_and_one_probe_closes_it(bus: Bus) -> None:
    """A failing replica gets no calls but a probe now and then; when one succeeds it is used as before."""
    async with pool(bus, 2, policy="round_robin", breaker={"failures": 2, "open_s": 0.4, "max_open_s": 0.8}) as (
        caller,
        [bad, good],
    ):
        bad.error = UnavailableError("crashed")
        for _ in range(4):
            assert (await caller.generate()).replica_id == "r1"
        assert [each.breaker for each in (await caller.replicas()).replicas] == [OPEN, CLOSED]
        assert bad.num_calls == 2
        until_s = time.monotonic() + 2.0
        while time.monotonic() < until_s:
            assert (await caller.generate()).replica_id == "r1"
            await asyncio.sleep(0.02)
        assert 3 <= bad.num_calls <= 6  # probes after 0.4, 0.8, 0.8, ... seconds
        bad.error, good.error = None, UnavailableError("now this one")
        answers = await asyncio.gather(*(caller.generate() for _ in range(4)))
        assert {answer.replica_id for answer in answers} == {"r0"}
        assert (await caller.replicas()).replicas[0].breaker == CLOSED


async def test_a_long_probe_closes_the_breaker_with_its_first_tokens(bus: Bus) -> None:
    """Whoever answers is well; the rest of the pool's calls need not wait for the end of the answer."""
    async with pool(bus, 1, engine={"token_s": 0.05}, breaker={"failures": 1, "open_s": 0.2}, max_tries=1) as (
        caller,
        [engine],
    ):
        engine.error = UnavailableError("crashed")
        await failure(caller.generate())
        assert (await caller.replicas()).replicas[0].breaker == OPEN
        engine.error = None
        probe = asyncio.ensure_future(caller.generate(num_tokens=60))
        await caller.until(lambda pool: pool.replicas[0].breaker == HALF_OPEN)
        await caller.until(lambda pool: pool.replicas[0].breaker == CLOSED)
        assert not probe.done()
        probe.cancel()


async def test_limits_follow_what_replicas_report(bus: Bus) -> None:
    """A long queue or a full cache halves the limit at once; it comes back step by step while it is used up."""
    limit = {"factor": 1.0, "decrease": 0.5, "increase": 0.25}
    async with pool(bus, 1, engine={"max_running": 8, "delay_s": 0.05}, limit=limit) as (caller, [engine]):
        assert (await caller.replicas()).replicas[0].limit == 8
        await engine.update(num_queued=8, num_running=8)
        await caller.until(lambda pool: pool.replicas[0].limit <= 2)  # the lease is renewed all the while
        await engine.update(num_queued=0, num_running=0)
        most = 0

        async def call() -> None:
            nonlocal most
            await caller.generate()
            most = max(most, engine.num_running)

        async with asyncio.timeout(20.0):
            while (await caller.replicas()).replicas[0].limit < 8:
                await asyncio.gather(*(call() for _ in range(12)))
        assert most <= 8
        await engine.update(kv_use=0.99)
        await caller.until(lambda pool: pool.replicas[0].limit == 1)


async def test_a_push_does_not_shrink_the_limit(bus: Bus) -> None:
    """While weights change all calls are queued, and its lease may say so for a moment longer."""
    async with pool(bus, 1, engine={"max_running": 8}) as (caller, [engine]):
        await engine.update(state=common_pb2.REPLICA_STATE_UPDATING, num_queued=64)
        await asyncio.sleep(1.5)
        await engine.update(state=common_pb2.REPLICA_STATE_READY)
        await asyncio.sleep(0.1)
        await engine.update(num_queued=0)
        await asyncio.sleep(0.8)
        assert (await caller.replicas()).replicas[0].limit == 8


async def test_a_drain_goes_on_when_the_lease_ends(bus: Bus) -> None:
    """The replica answers though it is no longer one of the pool's."""
    async with (
        pool(bus, 1, engine={"delay_s": 1.0}) as (caller, [engine]),
        connect_channel(engine.replica.address) as channel,
    ):
        request = generate_pb2.GenerateRequest(sampling=generate_pb2.SamplingParams(max_new_tokens=1))
        running = asyncio.ensure_future(generate_pb2_grpc.GenerateServiceStub(channel).Generate(request, timeout=5.0))
        await until(lambda: engine.num_running == 1)
        drain = router_pb2.RouterServiceDrainReplicaRequest(replica_id="r0", grace_s=5.0)
        draining = asyncio.ensure_future(caller.router.DrainReplica(drain, timeout=10.0))
        await caller.until(lambda pool: pool.replicas[0].replica.state == common_pb2.REPLICA_STATE_DRAINING)
        assert engine._lease is not None
        await engine._lease._bucket.delete("r0")
        assert (await draining).num_finished == 1
        await running


async def test_an_engine_that_says_it_is_full_is_left_alone_for_a_moment(steady_bus: Bus) -> None:
    """It is asked a few times per second by all calls together, not by each of them."""
    async with pool(steady_bus, 1, wait_for_replica_s=1.0) as (caller, [engine]):
        engine.error = OverloadedError("queue full")
        errors = await asyncio.gather(*(failure(caller.generate()) for _ in range(50)))
        assert {error.code() for error in errors} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert engine.num_calls < 125  # each by itself would ask five times, 250 in all


async def test_two_routers_agree_where_a_session_belongs(steady_bus: Bus, run_name: str) -> None:
    """With consistent_hash, though neither tells the other anything."""
    async with (
        pool(steady_bus, 4, policy="consistent_hash") as (caller, _),
        connect(steady_bus.config, run=run_name) as other_bus,
        router(other_bus, policy="consistent_hash") as other,
    ):
        await other.until_routable(4)
        for index in range(20):
            mine, theirs = await caller.generate(f"s{index}"), await other.generate(f"s{index}")
            assert mine.replica_id == theirs.replica_id


async def test_a_group_shares_the_replica_that_has_its_prompt(bus: Bus) -> None:
    """With prefix: equal prompts go to one replica, though their sessions differ; other prompts spread."""
    async with pool(bus, 3, policy="prefix") as (caller, _):
        prompts = [[number] * 100 for number in range(3)]
        homes = collections.defaultdict(set)
        for turn in range(4):
            for number, prompt in enumerate(prompts):
                answer = await caller.generate(f"{number}-{turn}", input_ids=prompt)
                homes[number].add(answer.replica_id)
        assert all(len(home) == 1 for home in homes.values())


async def test_a_drained_replica_hands_its_calls_over(bus: Bus) -> None:
    """Through the router: calls go on elsewhere from their tokens, sessions move, and the rest do not."""
    async with pool(bus, 2, engine={"token_s": 0.02}, chunk_tokens=4) as (caller, [leaving, staying]):
        sessions = [f"s{n}" for n in range(8)]
        before = {each: (await caller.generate(each)).replica_id for each in sessions}
        pending = {each: asyncio.ensure_future(caller.generate(each, num_tokens=50)) for each in sessions}
        await until(lambda: leaving.num_running == 4, timeout_s=5.0)
        request = router_pb2.RouterServiceDrainReplicaRequest(replica_id="r0", grace_s=0.3)
        drained = await caller.router.DrainReplica(request, timeout=10.0)
        assert (drained.num_finished, drained.num_handed_over) == (0, 4)
        for each, call in pending.items():
            answer = await call
            assert list(answer.output_ids) == ids(50)
            assert answer.replica_id == "r1"
            assert before[each] in ("r0", "r1")
        assert all(len(taken_over.input_ids) >= 4 for taken_over in staying.requests if "#" in taken_over.request_id)
        assert (await caller.generate("s0")).replica_id == "r1"


class Churn:
    """Replicas that come and go at random, and who of them was there without a break."""

    def __init__(self, bus: Bus, caller: Caller, seed: int) -> None:
        self._bus = bus
        self._caller = caller
        self._random = random.Random(seed)
        self._leaving: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.gone: set[str] = set()
        self.num_started = 0

    async def _live(self, name: str, crash: bool, leave: asyncio.Event) -> None:
        engine = SimulatedEngine(self._bus, replica_id=name, token_s=0.02, max_running=64)
        async with engine.running():
            await leave.wait()
            self.gone.add(name)
            if crash:
                await engine.stop_serving()
            else:
                request = router_pb2.RouterServiceDrainReplicaRequest(replica_id=name, grace_s=0.2)
                await self._caller.router.DrainReplica(request, timeout=10.0)

    def start(self) -> None:
        name = f"r{self.num_started:03}"
        self.num_started += 1
        self._leaving[name] = leave = asyncio.Event()
        self._tasks.append(asyncio.create_task(self._live(name, self._random.random() < 0.5, leave)))

    def stop_one(self) -> None:
        name = self._random.choice(sorted(self._leaving))
        self._leaving.pop(name).set()

    async def run(self, duration_s: float, num_replicas: int) -> None:
        """Start and stop some, so that there are about `num_replicas`."""
        until_s = time.monotonic() + duration_s
        while time.monotonic() < until_s:
            await asyncio.sleep(self._random.uniform(0.1, 0.4))
            self.stop_one()
            self.start()
            assert len(self._leaving) == num_replicas

    @contextlib.asynccontextmanager
    async def of(self, num_replicas: int) -> AsyncIterator["Churn"]:
        for _ in range(num_replicas):
            self.start()
        try:
            await self._caller.until_routable(num_replicas)
            yield self
        finally:
            for leave in self._leaving.values():
                leave.set()
            await asyncio.gather(*self._tasks)


async def test_replicas_that_come_and_go_lose_no_request(steady_bus: Bus) -> None:
    """Sixteen, half of those that leave by a crash: every answer is whole, and sessions stay where they can."""
    async with (
        router(steady_bus, wait_for_replica_s=10.0, chunk_tokens=4) as caller,
        Churn(steady_bus, caller, 0).of(16) as churn,
    ):
        stop, num_answers = asyncio.Event(), 0

        async def play(session: str) -> None:
            nonlocal num_answers
            home = ""
            while not stop.is_set():
                answer = await caller.generate(session, num_tokens=10, timeout_s=30.0)
                assert list(answer.output_ids) == ids(10)
                if home and home not in churn.gone:
                    assert answer.replica_id == home
                home = answer.replica_id
                num_answers += 1

        async with asyncio.TaskGroup() as group:
            for number in range(32):
                group.create_task(play(f"s{number}"))
            await churn.run(15.0, 16)
            stop.set()
        assert churn.num_started > 40
        assert num_answers > 500
