"""The engine of `make bench-async` keeps its slots and its pace, and takes pushes as a real one does."""

import asyncio
from typing import Any

import pytest

from penstock.bus.connection import Bus
from penstock.clients import GenerateClient
from penstock.config import BusConfig
from penstock.testing.paced_engine import Pace, PacedEngine, PausableClock
from penstock.v1 import common_pb2, generate_pb2
from services.rollout.testing.weight_reader import WeightReader
from tests.support.waiting import HANG_S
from tests.support.weights.publishing import publishing, snapshot


@pytest.fixture
def bus_config(nats_url: str) -> BusConfig:
    """Leases that do not lapse while the machine is busy."""
    return BusConfig(url=nats_url, lease_ttl_s=30.0, ack_wait_s=1.0)


def _engine(bus: Bus, *, num_tokens: int = 1, **settings: Any) -> PacedEngine:
    pace = Pace(num_tokens=num_tokens, token_s=1e-4)
    return PacedEngine(bus, pace=lambda _: pace, weights=WeightReader(), **settings)


def _request() -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        input_ids=[1, 2, 3], sampling=generate_pb2.SamplingParams(max_new_tokens=1000), chunk_tokens=64
    )


async def test_tokens_come_as_from_a_real_engine(bus: Bus) -> None:
    """The first at once, then in chunks of the size that was asked for; the last chunk has the end and the usage."""
    async with _engine(bus, num_tokens=150).running() as engine, GenerateClient(engine.replica.address) as client:
        chunks = [chunk async for chunk in client.stream(_request(), timeout_s=HANG_S)]
    assert [len(chunk.output_ids) for chunk in chunks] == [1, 64, 64, 21]
    assert chunks[-1].finish_reason == generate_pb2.FINISH_REASON_STOP
    assert (chunks[-1].usage.num_prompt_tokens, chunks[-1].usage.num_output_tokens) == (3, 150)


async def test_chunks_of_a_long_answer_grow_as_a_real_engines_do(bus: Bus) -> None:
    """Up to one in 16 of the tokens before."""
    async with _engine(bus, num_tokens=4000).running() as engine, GenerateClient(engine.replica.address) as client:
        request = _request()
        request.sampling.max_new_tokens = 4000
        sizes = [len(chunk.output_ids) async for chunk in client.stream(request, timeout_s=HANG_S)]
    assert sum(sizes) == 4000
    assert set(sizes[1:16]) == {64}
    assert sizes[-3:-1] == [sum(sizes[:-3]) // 16, sum(sizes[:-2]) // 16]


async def test_a_prompt_is_cached_once_its_group_has_begun(bus: Bus) -> None:
    """The first call of a group computes it, the next finds it; calls without a group share nothing."""
    found = []
    async with _engine(bus).running() as engine, GenerateClient(engine.replica.address) as client:
        for group_id in ("g", "g", "h", "", ""):
            request = _request()
            request.group_id = group_id
            *_, last = [chunk async for chunk in client.stream(request, timeout_s=HANG_S)]
            found.append(last.usage.num_cached_tokens)
    assert found == [0, 3, 0, 0, 0]


async def test_a_call_without_a_slot_waits(bus: Bus) -> None:
    """With one slot the second call begins when the first has been answered."""
    answered: list[int] = []

    def pace(_: generate_pb2.GenerateRequest) -> Pace:
        answered.append(engine.num_answered)
        return Pace(num_tokens=500, token_s=1e-4)

    async def call(client: GenerateClient) -> None:
        async for _ in client.stream(_request(), timeout_s=HANG_S):
            pass

    engine = PacedEngine(bus, pace=pace, weights=WeightReader(), max_running=1)
    async with engine.running(), GenerateClient(engine.replica.address) as client:
        await asyncio.gather(call(client), call(client))
    assert answered == [0, 1]


@pytest.mark.usefixtures("rendezvous")
async def test_a_push_brings_the_trainers_version(bus: Bus) -> None:
    """The publisher accepts its digests, and tokens are stamped with the new version."""
    async with (
        _engine(bus).running() as engine,
        publishing(bus, transport="shared_memory") as publisher,
        GenerateClient(engine.replica.address) as client,
    ):
        report = await publisher.publish(snapshot(3, shared=True))
        assert (report.num_replicas, report.num_failed) == (1, 0)
        assert engine.replica.state == common_pb2.REPLICA_STATE_READY
        [chunk] = [chunk async for chunk in client.stream(_request(), timeout_s=HANG_S)]
    assert [span.policy_version for span in chunk.version_spans] == [3]


async def test_paused_time_does_not_count() -> None:
    """What was due 5 s on is due 5 s on after the pause too, however long that was."""
    now = 100.0
    clock = PausableClock(lambda: now)
    now += 1
    clock.pause()
    now += 50
    assert clock.time() == 101.0
    clock.resume()
    now += 2
    assert clock.time() == 103.0
