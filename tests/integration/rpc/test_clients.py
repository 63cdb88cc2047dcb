"""Clients against real servers: deadlines, retries and cancellation."""

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.bus.connection import Bus
from penstock.clients import GenerateClient, RewardClient, RouterClient, TrainerClient
from penstock.clients.resumable import ResumableTurn
from penstock.errors import DeadlineError, InvalidRequestError, OverloadedError, PenstockError, UnavailableError
from penstock.rpc.server import RpcServer
from penstock.runtime.ports import free_ports
from penstock.testing.answers import FIRST_ID, logprob_of
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.v1 import (
    generate_pb2,
    reward_pb2,
    reward_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)
from tests.support.deadlines import long_enough
from tests.support.waiting import HANG_S, promptly, until

REQUEST = generate_pb2.GenerateRequest(
    request_id="r", session_id="s", input_ids=[1], sampling=generate_pb2.SamplingParams(max_new_tokens=3)
)


@pytest.fixture
async def engine(bus: Bus) -> AsyncIterator[SimulatedEngine]:
    """An engine that answers."""
    async with SimulatedEngine(bus).running() as running:
        yield running


async def test_generate_returns_the_engines_answer(engine: SimulatedEngine) -> None:
    """Ids and logprobs as they were sent."""
    async with GenerateClient(engine.replica.address) as client:
        response = await client.generate(REQUEST, timeout_s=HANG_S)
    assert list(response.output_ids) == [FIRST_ID, FIRST_ID + 1, FIRST_ID + 2]
    assert list(response.logprobs) == [logprob_of(token) for token in response.output_ids]


async def test_a_client_that_is_dropped_is_freed_with_its_channel(engine: SimulatedEngine) -> None:
    """Without a collection of garbage: with the last channel of a process, gRPC's threads end."""
    gc.collect()
    gc.disable()
    try:
        client = GenerateClient(engine.replica.address)
        channel = weakref.ref(client._channel)
        await client.generate(REQUEST, timeout_s=HANG_S, retry_until=time.monotonic() + HANG_S)
        await client.close()
        del client
        await until(lambda: channel() is None)
    finally:
        gc.enable()


async def test_what_may_succeed_later_is_tried_again_under_a_new_request_id(engine: SimulatedEngine) -> None:
    """The session stays, for affinity; the request id does not, or an engine might take it for a repetition."""
    engine.error = OverloadedError("the queue is full")
    async with GenerateClient(engine.replica.address) as client:
        playing = asyncio.create_task(client.generate(REQUEST, timeout_s=HANG_S, retry_until=time.monotonic() + 600))
        await until(lambda: engine.num_calls >= 3)
        engine.error = None
        await playing
    ids = [request.request_id for request in engine.requests]
    assert ids[:3] == ["r", "r#1", "r#2"]
    assert len(set(ids)) == len(ids)
    assert {request.session_id for request in engine.requests} == {"s"}


async def test_a_server_that_comes_late_is_waited_for(bus: Bus) -> None:
    """Nobody listens at first; the client connects by itself when somebody does."""
    port = free_ports(1)[0]
    async with GenerateClient(f"127.0.0.1:{port}") as client:
        with capture_logs() as events:
            playing = asyncio.create_task(
                client.generate(REQUEST, timeout_s=HANG_S, retry_until=time.monotonic() + 600)
            )
            await until(lambda: "call.retried" in [event["event"] for event in events])
        assert not playing.done()
        async with SimulatedEngine(bus, port=port).running():
            assert (await playing).output_ids


async def test_without_retries_the_first_failure_is_raised_and_names_the_server() -> None:
    """The message says whom it could not reach."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    async with GenerateClient(address) as client:
        with pytest.raises(UnavailableError, match=f"generate at {address}"):
            await client.generate(REQUEST, timeout_s=HANG_S)


async def test_retries_end_in_time_with_the_last_reason() -> None:
    """The caller hears why, not just that time is up."""
    async with GenerateClient(f"127.0.0.1:{free_ports(1)[0]}") as client:
        with pytest.raises(UnavailableError):
            await promptly(client.generate(REQUEST, timeout_s=600.0, retry_until=time.monotonic() + 0.6))


async def test_what_can_never_succeed_is_not_tried_again(engine: SimulatedEngine) -> None:
    """One call, then the error."""
    engine.error = InvalidRequestError("the prompt is too long")
    async with GenerateClient(engine.replica.address) as client:
        with pytest.raises(InvalidRequestError, match="the prompt is too long"):
            await client.generate(REQUEST, timeout_s=HANG_S, retry_until=time.monotonic() + 600)
    assert engine.num_calls == 1


async def test_a_deadline_reaches_the_server_and_ends_the_call(engine: SimulatedEngine) -> None:
    """The server knows how long the caller waits, and is cancelled after it."""
    engine.delay_s = 600.0
    async with GenerateClient(engine.replica.address) as client:

        async def play(timeout_s: float) -> None:
            with pytest.raises(DeadlineError):
                await client.generate(REQUEST, timeout_s=timeout_s)

        timeout_s = await long_enough(play, lambda: any(engine.deadlines_s))
    assert (engine.deadlines_s[-1] or 0.0) <= timeout_s + 0.01, "gRPC sends what is left in steps of 10 ms, rounded up"
    await until(lambda: engine.num_running == 0)


async def test_cancelling_a_caller_cancels_the_call(engine: SimulatedEngine) -> None:
    """So that an engine does not generate for nobody."""
    engine.delay_s = 600.0
    async with GenerateClient(engine.replica.address) as client:
        playing = asyncio.create_task(client.generate(REQUEST, timeout_s=60.0, retry_until=time.monotonic() + 600))
        await until(lambda: engine.num_running == 1)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await until(lambda: engine.num_cancelled == 1)
    assert engine.num_calls == 1


class OtherServices(
    reward_pb2_grpc.RewardServiceServicer,
    router_pb2_grpc.RouterServiceServicer,
    trainer_pb2_grpc.TrainerServiceServicer,
):
    """Answers what tests tell apart."""

    async def VerifyBatch(  # noqa: N802 - the contract's name
        self, request: reward_pb2.VerifyBatchRequest, context: Any
    ) -> reward_pb2.VerifyBatchResponse:
        reversed_ids = [item.item_id for item in reversed(request.items)]
        return reward_pb2.VerifyBatchResponse(verdicts=[reward_pb2.Verdict(item_id=name) for name in reversed_ids])

    async def ListProfiles(self, request: Any, context: Any) -> reward_pb2.ListProfilesResponse:  # noqa: N802 - the contract's name
        return reward_pb2.ListProfilesResponse(profiles=[reward_pb2.Profile(name="math")])

    async def ListReplicas(self, request: Any, context: Any) -> router_pb2.ListReplicasResponse:  # noqa: N802 - the contract's name
        return router_pb2.ListReplicasResponse(published_version=7)

    async def GetRun(self, request: Any, context: Any) -> trainer_pb2.GetRunResponse:  # noqa: N802 - the contract's name
        return trainer_pb2.GetRunResponse(step=3, num_steps=9)


@pytest.fixture
async def other_address() -> AsyncIterator[str]:
    """Address of a server of the other services."""
    server = RpcServer(host="127.0.0.1", port=0)
    servicer = OtherServices()
    server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, servicer, "penstock.v1.RewardService")
    server.add(router_pb2_grpc.add_RouterServiceServicer_to_server, servicer, "penstock.v1.RouterService")
    server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, servicer, "penstock.v1.TrainerService")
    await server.start()
    yield server.address
    await server.drain(0.0)


async def streamed(client: GenerateClient, request: generate_pb2.GenerateRequest) -> list[generate_pb2.GenerateChunk]:
    """All chunks of a stream."""
    return [chunk async for chunk in client.stream(request, timeout_s=HANG_S)]


async def play(client: GenerateClient, continuation: ResumableTurn) -> None:
    """One attempt."""
    async for chunk in client.stream(continuation.remaining(), timeout_s=HANG_S):
        continuation.add(chunk)


async def test_a_stream_yields_tokens_as_they_come(engine: SimulatedEngine) -> None:
    """One by one, or as many at a time as were asked for; together they are the answer of a call."""
    request = generate_pb2.GenerateRequest()
    request.CopyFrom(REQUEST)
    async with GenerateClient(engine.replica.address) as client:
        for chunk_tokens, sizes in ((0, [1, 1, 1]), (2, [2, 1]), (16, [3])):
            request.chunk_tokens = chunk_tokens
            continuation = ResumableTurn(request)
            assert [len(chunk.output_ids) for chunk in await streamed(client, request)] == sizes
            await play(client, continuation)
            assert continuation.response() == await client.generate(request, timeout_s=HANG_S)


async def test_a_stream_that_breaks_gives_its_tokens_and_then_the_reason(engine: SimulatedEngine, bus: Bus) -> None:
    """And another engine plays the rest: the response is that of an engine that did not break."""
    engine.fail_after = 2
    continuation = ResumableTurn(REQUEST)
    async with GenerateClient(engine.replica.address) as client:
        with pytest.raises(UnavailableError, match=f"generate at {engine.replica.address}: told to fail after 2"):
            await play(client, continuation)
    assert continuation.num_tokens == 2
    async with SimulatedEngine(bus).running() as other, GenerateClient(other.replica.address) as client:
        unbroken = await client.generate(REQUEST, timeout_s=HANG_S)
        await play(client, continuation)
    assert continuation.response() == unbroken
    assert other.requests[-1].request_id == "r#1"


async def test_a_stream_is_never_tried_again_by_itself(engine: SimulatedEngine) -> None:
    """Its tokens are with the caller, who alone knows what is left."""
    engine.error = OverloadedError("the queue is full")
    async with GenerateClient(engine.replica.address) as client:
        with pytest.raises(OverloadedError, match="the queue is full"):
            await streamed(client, REQUEST)
    assert engine.num_calls == 1


async def test_a_deadline_ends_a_stream(engine: SimulatedEngine) -> None:
    """In the middle of it, at both ends."""
    engine.hang_after = 1
    async with GenerateClient(engine.replica.address) as client:
        with pytest.raises(DeadlineError):
            [chunk async for chunk in client.stream(REQUEST, timeout_s=0.3)]
    await until(lambda: engine.num_running == 0)


async def test_leaving_a_stream_cancels_it_at_the_server(engine: SimulatedEngine) -> None:
    """By ending the iteration, or by cancelling whoever iterates."""
    engine.hang_after = 1
    async with GenerateClient(engine.replica.address) as client:
        async with aclosing(client.stream(REQUEST, timeout_s=60.0)) as chunks:
            assert (await anext(chunks)).output_ids == [FIRST_ID]
        await until(lambda: engine.num_cancelled == 1)
        reading = asyncio.create_task(streamed(client, REQUEST))
        await until(lambda: engine.num_running == 1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: engine.num_cancelled == 2)


async def test_a_stream_without_an_end_is_an_error(bus: Bus) -> None:
    """A server that just stops has broken the contract; it must not pass for a short answer."""

    class Stopping(SimulatedEngine):
        async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[generate_pb2.GenerateChunk]:  # noqa: N802 - gRPC's name
            yield generate_pb2.GenerateChunk(output_ids=[FIRST_ID])

    async with Stopping(bus).running() as engine, GenerateClient(engine.replica.address) as client:
        with pytest.raises(PenstockError, match="request 'r' ended without a finish reason"):
            await streamed(client, REQUEST)


async def test_verdicts_of_other_items_are_refused(other_address: str) -> None:
    """Verdicts in another order would give every sample its neighbour's reward."""
    items = [reward_pb2.VerifyItem(item_id=name) for name in ("a", "b")]
    async with RewardClient(other_address) as client:
        assert [verdict.item_id for verdict in await client.verify_batch(items[:1], timeout_s=HANG_S)] == ["a"]
        with pytest.raises(PenstockError, match="with verdicts of other items"):
            await client.verify_batch(items, timeout_s=HANG_S)


async def test_a_verdict_that_takes_too_long_is_asked_for_again() -> None:
    """With twice the time, but only if the caller wants to wait."""
    deadlines_s: list[float] = []

    class SlowAtFirst(reward_pb2_grpc.RewardServiceServicer):
        async def VerifyBatch(self, request: Any, context: Any) -> reward_pb2.VerifyBatchResponse:  # noqa: N802 - the contract's name
            deadlines_s.append(context.time_remaining())
            if len(deadlines_s) <= 2:
                raise DeadlineError("the item hangs")
            return reward_pb2.VerifyBatchResponse(verdicts=[reward_pb2.Verdict(item_id="a", score=1.0)])

    server = RpcServer(host="127.0.0.1", port=0)
    server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, SlowAtFirst(), "penstock.v1.RewardService")
    await server.start()
    items = [reward_pb2.VerifyItem(item_id="a")]
    try:
        async with RewardClient(server.address) as client:
            with pytest.raises(DeadlineError):
                await client.verify_batch(items, timeout_s=60.0)
            [verdict] = await client.verify_batch(items, timeout_s=60.0, retry_until=time.monotonic() + 600)
    finally:
        await server.drain(0.0)
    assert (verdict.score, len(deadlines_s)) == (1.0, 3)
    assert deadlines_s[1] < 61 < deadlines_s[2] < 121


async def test_the_small_calls_return_what_the_servers_say(other_address: str) -> None:
    """Profiles, pool and run."""
    async with RewardClient(other_address) as reward, RouterClient(other_address) as router:
        assert [profile.name for profile in await reward.list_profiles()] == ["math"]
        assert (await router.list_replicas()).published_version == 7
    async with TrainerClient(other_address) as trainer:
        run = await trainer.get_run()
    assert (run.step, run.num_steps) == (3, 9)
