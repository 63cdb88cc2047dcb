"""The router when replicas die, fail, or cannot be reached."""

import asyncio
import contextlib
import signal

import grpc
import pytest
from structlog.testing import capture_logs

from penstock.bus.connection import Bus
from penstock.clients.generate import GenerateClient
from penstock.config import BusConfig, RunConfig
from penstock.errors import MissingImageError, NotReadyError, OverloadedError, PoisonError, UnavailableError
from penstock.runtime.security import Security
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.testing.simulated_process import simulated_process
from penstock.v1 import common_pb2, generate_pb2, router_pb2
from services.rollout.worker.episodes.turn import TurnPlayer
from services.router.config import RouterConfig, RouterSettings
from services.router.resumable_stream import ResumableStream
from services.router.server import serve
from tests.support.router.routers import failure, ids, pool, router
from tests.support.waiting import HANG_S, promptly, until

CLOSED, OPEN, HALF_OPEN = (
    router_pb2.BREAKER_STATE_CLOSED,
    router_pb2.BREAKER_STATE_OPEN,
    router_pb2.BREAKER_STATE_HALF_OPEN,
)


async def test_a_unary_call_goes_on_from_the_tokens_of_a_killed_replica(
    bus: Bus, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 in mid-answer: the caller gets the answer that an unbroken replica gives, and no second one is begun."""
    num_taken, take = 0, ResumableStream.take

    def take_and_count(stream: ResumableStream, chunk: bytes) -> bytes:
        nonlocal num_taken
        num_taken += len(generate_pb2.GenerateChunk.FromString(chunk).output_ids)
        return take(stream, chunk)

    monkeypatch.setattr(ResumableStream, "take", take_and_count)
    async with (
        SimulatedEngine(bus, replica_id="unbroken", policy_version=2).running() as unbroken,
        router(bus, chunk_tokens=4) as caller,
    ):
        await caller.until_routable(1)
        whole = await caller.generate("s", num_tokens=60, input_ids=[5, 6])
        await unbroken.update(state=common_pb2.REPLICA_STATE_DRAINING)
        async with simulated_process(bus, run_name, "a-victim", token_s=0.02, hang_after=30) as victim:
            await caller.until(lambda pool: pool.replicas[0].routable)
            pending = asyncio.ensure_future(caller.generate("s", num_tokens=60, input_ids=[5, 6], request_id="q"))
            await until(lambda: num_taken >= 60 + 4)  # of the unbroken one's answer, and of the victim's
            async with SimulatedEngine(bus, replica_id="b-heir", policy_version=2).running() as heir:
                await caller.until_routable(2)
                victim.send_signal(signal.SIGKILL)
                answer = await promptly(pending)
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
    async with (
        simulated_process(bus, run_name, "a-victim", token_s=0.02, hang_after=30) as victim,
        router(bus) as caller,
    ):
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
            await promptly(playing)
        assert [token for chunk in chunks for token in chunk.output_ids] == ids(60)
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [0] * (len(chunks) - 1)
        assert chunks[-1].finish_reason == generate_pb2.FINISH_REASON_LENGTH
        assert chunks[-1].usage == generate_pb2.Usage(num_prompt_tokens=2, num_output_tokens=60)
        assert [chunk.HasField("usage") for chunk in chunks].count(True) == 2
        assert len(heir.requests) == 1


async def test_no_token_comes_twice_whatever_a_stream_breaks_off_with(steady_bus: Bus) -> None:
    """RESOURCE_EXHAUSTED in mid-answer is no refusal: gRPC says so by itself of a stream that was reset."""
    for error in (OverloadedError("calm down"), NotReadyError("not any more")):
        async with pool(steady_bus, 2, engine={"fail_after": 3, "fail_with": error}, chunk_tokens=1) as (
            caller,
            engines,
        ):
            assert list((await caller.generate(num_tokens=5)).output_ids) == ids(5)
            chunks = [chunk async for chunk in caller.stream(num_tokens=5)]
            assert [token for chunk in chunks for token in chunk.output_ids] == ids(5)
            assert sum(engine.num_calls for engine in engines) == 4


async def test_a_replica_that_delivered_tokens_costs_no_attempt(steady_bus: Bus) -> None:
    """Also with max_attempts = 1, and also if nobody may wait: the call was let in already."""
    async with pool(steady_bus, 1, engine={"fail_after": 3}, max_attempts=1, max_waiting=0, chunk_tokens=1) as (
        caller,
        _,
    ):
        assert list((await caller.generate(num_tokens=5)).output_ids) == ids(5)


async def test_an_image_that_is_not_stored_is_no_failure_of_the_replica(steady_bus: Bus) -> None:
    """The caller hears it at once, and no breaker opens."""
    engine = {"error": MissingImageError("store it again")}
    async with pool(steady_bus, 1, engine=engine, breaker={"failures": 1}) as (caller, _):
        error = await failure(caller.generate())
        assert error.code() == grpc.StatusCode.NOT_FOUND
        assert [each.breaker for each in (await caller.replicas()).replicas] == [CLOSED]


async def test_an_outage_of_the_image_store_is_logged_once(steady_bus: Bus) -> None:
    """The only replica rejects a call again and again: one warning, which names it, and one more in the next outage."""
    async with pool(steady_bus, 1, wait_for_replica_s=30.0) as (caller, [engine]):
        for _ in range(2):
            with capture_logs() as events:
                engine.error, num_before = NotReadyError("images[0]: cannot be fetched from NATS"), engine.num_calls
                pending = asyncio.ensure_future(caller.generate(timeout_s=60.0))
                await until(lambda num=num_before: engine.num_calls >= num + 3)
                engine.error = None
                await pending
            first, *others = (event for event in events if event["event"] == "generate.retried")
            assert (first["log_level"], first["replica_id"]) == ("warning", engine.replica_id)
            assert {event["log_level"] for event in others} == {"debug"}


async def test_a_call_gets_the_replica_that_can_be_reached_again(steady_bus: Bus) -> None:
    """Within a moment, though it is the one that this very call could not reach."""
    async with pool(steady_bus, 1, wait_for_replica_s=20.0, breaker={"open_s": 0.2, "max_open_s": 0.4}) as (
        caller,
        [engine],
    ):
        await engine.stop_serving()
        pending = asyncio.ensure_future(caller.generate(timeout_s=30.0))
        await caller.until(lambda pool: pool.replicas[0].breaker == OPEN)
        await engine.serve_again()
        assert (await promptly(pending)).replica_id == "r0"


async def test_a_pool_that_nobody_can_reach_is_given_up_in_time(steady_bus: Bus) -> None:
    """wait_for_replica_s counts all waits of a call, those that ended with a probe too."""
    async with pool(steady_bus, 1, wait_for_replica_s=1.0, breaker={"open_s": 0.2, "max_open_s": 0.2}) as (
        caller,
        [engine],
    ):
        await engine.stop_serving()
        error = await failure(caller.generate(timeout_s=30.0))
        assert error.code() == grpc.StatusCode.UNAVAILABLE  # and not DEADLINE_EXCEEDED


async def test_a_hasty_caller_says_nothing_against_a_slow_connection(steady_bus: Bus) -> None:
    """Its time was up before the connection was there: no reason to keep others away."""
    stop = asyncio.Event()

    async def say_nothing(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await stop.wait()
        writer.close()

    async with pool(steady_bus, 1) as (caller, [engine]):
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


async def test_a_stream_that_is_left_is_cancelled_in_the_engine(steady_bus: Bus) -> None:
    """And its slot is free again."""
    async with pool(steady_bus, 1, engine={"token_s": 0.01}) as (caller, [engine]):
        stream = caller.stream(num_tokens=1000)
        await stream.read()
        stream.cancel()
        await until(lambda: engine.num_cancelled == 1)
        await caller.until(lambda pool: pool.replicas[0].num_in_flight == 0)


@pytest.mark.slow
async def test_a_turn_that_kills_the_only_replica_is_given_up_though_each_restart_is_slow(
    bus: Bus, run_name: str
) -> None:
    """The count of what it killed is not lost: it waits for the next replica when others no longer do."""
    async with router(bus, wait_for_replica_s=0.2) as caller, GenerateClient(caller.address) as client:
        request = generate_pb2.GenerateRequest(sampling=generate_pb2.SamplingParams(max_new_tokens=4), session_id="s")
        player = TurnPlayer(client, wait_timeout_s=300.0)
        killing = asyncio.create_task(player.play(request, budget_s=300.0, restore_images=_restore_none))
        for _ in range(3):
            async with simulated_process(bus, run_name, "victim", die_after=0) as victim:
                await asyncio.wait_for(victim.wait(), 30.0)
                await caller.until(lambda pool: not pool.replicas)
                # It has been waiting since before this call, whose patience ends.
                assert (await failure(caller.generate())).code() == grpc.StatusCode.UNAVAILABLE
        with pytest.raises(PoisonError, match="given up after 3 replicas failed"):
            await asyncio.wait_for(killing, 30.0)


async def _restore_none(_: float) -> None:
    raise AssertionError("the turn has no images")


async def test_progress_resets_the_count_of_tries_but_not_for_ever(steady_bus: Bus) -> None:
    """Replicas that each break off after a token bring a short answer to its end; a long one is given up."""
    async with pool(
        steady_bus, 3, engine={"fail_after": 1}, max_attempts=2, chunk_tokens=1, breaker={"failures": 100}
    ) as (
        caller,
        engines,
    ):
        answer = await caller.generate(num_tokens=4)
        assert list(answer.output_ids) == ids(4)
        assert sum(engine.num_calls for engine in engines) == 4
        error = await failure(caller.generate(num_tokens=40))
        assert error.code() == grpc.StatusCode.ABORTED
        assert "given up after 8 replicas failed" in (error.details() or "")


async def test_the_breaker_opens_and_one_probe_closes_it(steady_bus: Bus) -> None:
    """A failing replica gets no calls but a probe now and then; when one succeeds it is used as before."""
    settings = {"balancing": "round_robin", "wait_for_replica_s": HANG_S}
    never = {"failures": 2, "open_s": HANG_S, "max_open_s": HANG_S}
    async with pool(steady_bus, 2, breaker=never, **settings) as (caller, [bad, _]):
        bad.error = UnavailableError("crashed")
        for _ in range(4):
            assert (await caller.generate()).replica_id == "r1"
        assert [each.breaker for each in (await caller.replicas()).replicas] == [OPEN, CLOSED]
        assert bad.num_calls == 2
    soon = {"failures": 2, "open_s": 0.4, "max_open_s": 0.8}
    async with pool(steady_bus, 2, breaker=soon, max_attempts=10, **settings) as (caller, [bad, good]):
        bad.error = UnavailableError("crashed")
        while bad.num_calls < 5:  # tests/unit/router/slots/test_breaker.py: when it is probed
            assert (await caller.generate()).replica_id == "r1"
        assert (await caller.replicas()).replicas[0].breaker == OPEN
        bad.error, good.error = None, UnavailableError("now this one")
        answers = await asyncio.gather(*(caller.generate() for _ in range(4)))
        assert {answer.replica_id for answer in answers} == {"r0"}
        assert (await caller.replicas()).replicas[0].breaker == CLOSED


async def test_a_long_probe_closes_the_breaker_with_its_first_tokens(steady_bus: Bus) -> None:
    """Whoever answers is well; the rest of the pool's calls need not wait for the end of the answer."""
    async with pool(
        steady_bus, 1, engine={"token_s": 0.05}, breaker={"failures": 1, "open_s": 0.2}, max_attempts=1
    ) as (
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


@pytest.mark.parametrize(
    "broken", ["penstock.bus.buckets.replica_lease.read_replica", "penstock.bus.buckets.watch._Seen"]
)
async def test_a_router_that_can_no_longer_follow_the_pool_ends(
    bus: Bus, bus_config: BusConfig, run_name: str, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """It would go on with the replicas of that moment for ever, and nobody would know: a bug there is the end of it."""
    recipe = RouterSettings(router=RouterConfig(), bus=bus_config, run=RunConfig(name=run_name))
    async with contextlib.AsyncExitStack() as stack:
        with capture_logs() as events:
            serving = asyncio.create_task(serve(recipe, asyncio.Event(), security=Security()))
            engine = await stack.enter_async_context(SimulatedEngine(bus, replica_id="one").running())
            await until(lambda: "replica.joined" in [event["event"] for event in events])
        assert not serving.done()

        def fail(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(broken, fail)
        await engine.update(num_queued=1)
        with pytest.raises(ZeroDivisionError, match="a bug"):
            await promptly(serving)
