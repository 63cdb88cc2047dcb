"""How a rollout engine lives and dies: lease, drain, and no process left behind whichever of them is killed."""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import json_format
from nats.js.kv import KeyValue

from penstock.bus.buckets.watch import Watch, watched
from penstock.bus.connection import connect
from penstock.clients import GenerateClient
from penstock.clients.resumable import ResumableTurn
from penstock.config import BusConfig
from penstock.errors import NotReadyError, UnavailableError
from penstock.testing.freezing import freeze, frozen
from penstock.v1 import common_pb2, generate_pb2, rollout_pb2
from services.rollout.engine.crash_streak import MAX_IN_A_ROW
from services.rollout.testing.engine_process import EngineProcess, engine_process, log_events
from tests.support.engine.push import Push
from tests.support.engine.reference import Reference
from tests.support.waiting import HANG_S, promptly, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("engine_forker")]

LEASE_TTL_S = BusConfig().lease_ttl_s


def _request(max_new_tokens: int) -> generate_pb2.GenerateRequest:
    sampling = generate_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=max_new_tokens)
    return generate_pb2.GenerateRequest(input_ids=[1, 2, 3], sampling=sampling)


def _endless_request() -> generate_pb2.GenerateRequest:
    """Greedy: this policy repeats itself and does not stop."""
    sampling = generate_pb2.SamplingParams(temperature=0.0, top_p=1.0, max_new_tokens=3900)
    return generate_pb2.GenerateRequest(input_ids=[1, 2, 3], sampling=sampling, chunk_tokens=16)


async def _play(client: GenerateClient, continuation: ResumableTurn) -> None:
    async for chunk in client.stream(continuation.remaining(), timeout_s=60):
        continuation.add(chunk)


def _replicas(watch: Watch) -> list[common_pb2.Replica]:
    return [json_format.Parse(value, common_pb2.Replica()) for value in watch.values.values()]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _children(pid: int) -> list[int]:
    pids = [child.pid for child in psutil.Process(pid).children(recursive=True)]
    assert len(pids) >= 2
    return pids


def _segments(*pids: int) -> set[Path]:
    """What processes have in shared memory by name."""
    paths = {Path(mapped.path) for pid in pids for mapped in psutil.Process(pid).memory_maps()}
    found = {path for path in paths if path.parent == Path("/dev/shm") and path.exists()}
    assert found
    return found


async def test_sigterm_drains(tiny_model_path: Path, nats_url: str, tmp_path: Path) -> None:
    """The lease tells of the engine. On SIGTERM requests may finish, new ones are refused, what lasts
    too long is handed over, and nothing is left."""
    async with (
        engine_process(tiny_model_path, nats_url, tmp_path, grace_s=2 * HANG_S) as engine,
        GenerateClient((await engine.replica()).address) as client,
        connect(BusConfig(url=nats_url), run=tmp_path.name) as bus,
        watched(await bus.bucket("replicas", ttl_s=LEASE_TTL_S), ttl_s=LEASE_TTL_S) as watch,
    ):
        async with asyncio.timeout(HANG_S):
            while not watch.values:
                await watch.changed(1.0)
        (leased,) = _replicas(watch)
        replica = await engine.replica()
        assert (leased.replica_id, leased.address) == (replica.replica_id, replica.address)
        assert (leased.state, leased.role) == (common_pb2.REPLICA_STATE_READY, common_pb2.REPLICA_ROLE_UNIFIED)
        children = _children(engine.process.pid)
        segments = _segments(engine.process.pid, *children)
        turns = [ResumableTurn(_endless_request()) for _ in range(8)]
        plays = [asyncio.create_task(_play(client, each)) for each in turns]
        await until(lambda: all(each.num_tokens > 0 for each in turns))
        calls = [asyncio.ensure_future(engine.generation.Generate(_request(20), timeout=60)) for _ in range(8)]
        await until(lambda: _have_arrived(engine, *plays, *calls))
        engine.process.send_signal(signal.SIGTERM)
        await until(lambda: [each.state for each in _replicas(watch)] == [common_pb2.REPLICA_STATE_DRAINING])
        answers = await asyncio.gather(*calls)
        assert all(answer.output_ids for answer in answers)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _until_refused(engine)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        await engine.control.DrainReplica(rollout_pb2.DrainReplicaRequest(grace_s=0.0), timeout=60)
        handed_over = await asyncio.gather(*plays, return_exceptions=True)
        assert {type(each) for each in handed_over} == {NotReadyError}
        assert await promptly(engine.process.wait()) == 0
        assert not any(_runs(pid) for pid in children)
        assert not list(engine.scratch.iterdir())  # nor the files of SGLang's sockets
        assert not any(path.exists() for path in segments)
        await until(lambda: not watch.values)


async def _have_arrived(engine: EngineProcess, *calls: "asyncio.Future[Any]") -> bool:
    """Whether each call is in the engine, or through."""
    replica = await engine.replica()
    return replica.num_running + replica.num_queued >= sum(not call.done() for call in calls)


async def _until_renewed(bucket: KeyValue, replica_id: str) -> None:
    """The lease was written again with nothing new in it, so it does not lapse."""
    written = await bucket.get(replica_id)

    async def is_renewed() -> bool:
        nonlocal written
        before, written = written, await bucket.get(replica_id)
        return written.revision != before.revision and written.value == before.value

    await until(is_renewed)


async def _until_refused(engine: EngineProcess) -> None:
    """The calls before may all have ended before the signal was noticed."""
    async with asyncio.timeout(HANG_S):
        while True:
            await engine.generation.Generate(_request(5), timeout=60)


@pytest.mark.slow
async def test_a_drained_replica_hands_over_and_stays(tiny_model_path: Path, nats_url: str, tmp_path: Path) -> None:
    """DRAINING in the lease at once, nothing new is taken, what outlasts the grace is handed over with its tokens."""
    async with (
        engine_process(tiny_model_path, nats_url, tmp_path, grace_s=20.0) as engine,
        GenerateClient((await engine.replica()).address) as client,
        connect(BusConfig(url=nats_url), run=tmp_path.name) as bus,
        watched(await bus.bucket("replicas", ttl_s=LEASE_TTL_S), ttl_s=LEASE_TTL_S) as watch,
    ):
        bucket = await bus.bucket("replicas", ttl_s=LEASE_TTL_S)
        with pytest.raises(grpc.aio.AioRpcError, match=r"grace_s = -1.0 must be 0"):
            await engine.control.DrainReplica(rollout_pb2.DrainReplicaRequest(grace_s=-1.0), timeout=20)
        turns = [ResumableTurn(_endless_request()) for _ in range(4)]
        plays = [asyncio.create_task(_play(client, each)) for each in turns]
        unary = asyncio.ensure_future(engine.generation.Generate(_endless_request(), timeout=60))
        await until(lambda: all(each.num_tokens > 0 for each in turns))
        short = asyncio.ensure_future(engine.generation.Generate(_request(5), timeout=60))
        await until(lambda: _have_arrived(engine, *plays, unary, short))
        patient = rollout_pb2.DrainReplicaRequest(grace_s=HANG_S)
        draining = asyncio.ensure_future(engine.control.DrainReplica(patient, timeout=60))
        await until(lambda: [each.state for each in _replicas(watch)] == [common_pb2.REPLICA_STATE_DRAINING])
        with pytest.raises(grpc.aio.AioRpcError, match="REPLICA_STATE_DRAINING") as caught:
            await engine.generation.Generate(_request(5), timeout=60)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert (await short).output_ids
        drained = await engine.control.DrainReplica(rollout_pb2.DrainReplicaRequest(grace_s=0.0), timeout=60)
        assert drained == await draining
        assert drained.num_handed_over == 5
        for failed in await asyncio.gather(*plays, return_exceptions=True):
            assert isinstance(failed, NotReadyError)  # no failure, of the replica or of the call
            assert "play the rest on another replica" in str(failed)
        assert await _code_of(unary) == grpc.StatusCode.FAILED_PRECONDITION
        outputs = [each.remaining().input_ids[3:] for each in turns]
        longest = max(outputs, key=len)
        assert all(len(one) > 1 and one == longest[: len(one)] for one in outputs)
        assert await engine.control.DrainReplica(rollout_pb2.DrainReplicaRequest(), timeout=60) == drained
        drained_and_idle = (common_pb2.REPLICA_STATE_DRAINING, 0)  # the load follows within a few seconds
        await until(lambda: [(each.state, each.num_running) for each in _replicas(watch)] == [drained_and_idle])
        await _until_renewed(bucket, (await engine.replica()).replica_id)
        assert [(each.state, each.num_running) for each in _replicas(watch)] == [drained_and_idle]
        engine.process.send_signal(signal.SIGTERM)
        assert await promptly(engine.process.wait()) == 0
        await until(lambda: not watch.values)


async def _code_of(call: Awaitable[object]) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


@pytest.mark.slow
async def test_a_dead_child_ends_the_process(tiny_model_path: Path, nats_url: str, tmp_path: Path) -> None:
    """SGLang's scheduler is killed: running requests fail, streams with what they have, the log says what happened,
    exit code 1, no lease left."""
    async with (
        engine_process(tiny_model_path, nats_url, tmp_path) as engine,
        GenerateClient((await engine.replica()).address) as client,
        connect(BusConfig(url=nats_url), run=tmp_path.name) as bus,
        watched(await bus.bucket("replicas", ttl_s=LEASE_TTL_S), ttl_s=LEASE_TTL_S) as watch,
    ):
        children = _children(engine.process.pid)
        turn = ResumableTurn(_endless_request())
        playing = asyncio.create_task(_play(client, turn))
        calls = [asyncio.ensure_future(engine.generation.Generate(_endless_request(), timeout=60)) for _ in range(16)]
        await until(lambda: turn.num_tokens > 0)
        os.kill(children[0], signal.SIGKILL)
        with pytest.raises(UnavailableError, match="the engine died"):
            await playing
        assert {await _code_of(call) for call in calls} == {grpc.StatusCode.UNAVAILABLE}
        assert await promptly(engine.process.wait()) == 1
        assert "engine.died" in [event["event"] for event in log_events(engine.log)]
        assert "error: the engine died" in engine.log.read_text()
        assert not any(_runs(pid) for pid in children)
        await until(lambda: not watch.values)


_CRASHING = """
from services.rollout.engine import crash_streak
from services.rollout.engine.sglang import generation

read = generation.read_generation

def crash(response, **arguments):
    if response["meta_info"]["prompt_tokens"] == 13:
        raise KeyError("output_token_logprobs")
    return read(response, **arguments)

generation.read_generation = crash
crash_streak.CrashStreak.__init__.__kwdefaults__["min_s"] = 0.0
"""
"""Read by the interpreter before the engine's own modules: its calls with 13 prompt tokens crash."""


@pytest.mark.slow
async def test_an_engine_that_only_crashes_ends(tiny_model_path: Path, nats_url: str, tmp_path: Path) -> None:
    """Each caller learns what crashed; the last one's engine ends with that error, exit code 1 and no lease left, so
    that its supervisor starts it again. Crashes between answers are borne. (The same engine, to start one less: without
    SGLang's radix cache, a prompt that was just computed is computed again.)"""
    (tmp_path / "sitecustomize.py").write_text(_CRASHING)
    environment = {"PYTHONPATH": str(tmp_path)}
    sound = generate_pb2.GenerateRequest(input_ids=list(range(1, 101)), sampling=_request(2).sampling)
    crashing = generate_pb2.GenerateRequest(input_ids=list(range(1, 14)), sampling=_request(2).sampling)
    async with (
        engine_process(
            tiny_model_path, nats_url, tmp_path, environment=environment, sglang={"disable_radix_cache": True}
        ) as engine,
        connect(BusConfig(url=nats_url), run=tmp_path.name) as bus,
        watched(await bus.bucket("replicas", ttl_s=LEASE_TTL_S), ttl_s=LEASE_TTL_S) as watch,
    ):
        for _ in range(2):
            answer = await engine.generation.Generate(sound, timeout=60)
            assert answer.usage.num_cached_tokens == 0
            for _ in range(MAX_IN_A_ROW - 1):
                assert await _code_of(engine.generation.Generate(crashing, timeout=60)) is grpc.StatusCode.INTERNAL
        assert await _code_of(engine.generation.Generate(crashing, timeout=60)) is grpc.StatusCode.INTERNAL
        assert await promptly(engine.process.wait()) == 1
        assert "answered none; the last: KeyError: 'output_token_logprobs'" in engine.log.read_text()
        await until(lambda: not watch.values)


@pytest.mark.slow
async def test_a_taken_port_is_said_at_once(tiny_model_path: Path, nats_url: str, tmp_path: Path) -> None:
    """Exit code 2 and one line, before anything is loaded."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(AssertionError, match=r"with 2:\s+error: rollout\.port: cannot listen on 127\.0\.0\.1:\d+"):
            async with engine_process(tiny_model_path, nats_url, tmp_path, port=taken.getsockname()[1]):
                pass


_IMPATIENT = """
from services.rollout.engine.sglang import scheduler_watch

scheduler_watch.silence_limit_s = lambda watchdog_timeout: watchdog_timeout / 20
scheduler_watch._ASK_EVERY_S = 0.5
"""
"""Read by the interpreter before the engine's own modules."""


@pytest.mark.slow
@pytest.mark.usefixtures("rendezvous")
async def test_a_scheduler_that_comes_back_and_one_that_hangs(
    tiny_model_path: Path, nats_url: str, tmp_path: Path, reference: Reference
) -> None:
    """A group that SGLang comes to too late is refused: the trainer has given up meanwhile, and SGLang is there for the
    next push at once. A scheduler that answers nothing any more ends the engine: its calls fail, exit code 1, no lease
    left."""
    (tmp_path / "sitecustomize.py").write_text(_IMPATIENT)
    settings = {"weight_sync": {"stage_timeout_s": 10.0}}
    environment = {"PYTHONPATH": str(tmp_path)}
    async with (
        engine_process(tiny_model_path, nats_url, tmp_path, environment=environment, trainer=settings) as engine,
        connect(BusConfig(url=nats_url), run=tmp_path.name) as bus,
        watched(await bus.bucket("replicas", ttl_s=LEASE_TTL_S), ttl_s=LEASE_TTL_S) as watch,
    ):
        children = _children(engine.process.pid)
        with frozen(children[0]), pytest.raises(grpc.aio.AioRpcError, match="exceeded its deadline"):
            await Push(engine, reference.perturbed(seed=1).weights, 1).prepare()
        await Push(engine, reference.perturbed(seed=2).weights, 2).complete()
        assert (await engine.replica()).policy_version == 2
        assert "too late; its trainer no longer waits" in engine.log.read_text()
        freeze(children[0])
        call = asyncio.ensure_future(engine.generation.Generate(_endless_request(), timeout=HANG_S))
        assert await promptly(engine.process.wait()) == 1
        assert await _code_of(call) is grpc.StatusCode.UNAVAILABLE
        assert "error: the engine died: SGLang's scheduler has answered nothing for 15 s" in engine.log.read_text()
        assert not any(_runs(pid) for pid in children)
        await until(lambda: not watch.values)
