"""Prefill and decode engines, real ones with KV that travels: together they are one unified engine.

Over nixl; `make test-mooncake` runs the same over mooncake, `make test-tensor-parallel` with engines of two processes.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from penstock.bus.buckets.replica_lease import read_replica
from penstock.bus.connection import connect
from penstock.clients.resumable import ResumableTurn
from penstock.config import BusConfig
from penstock.v1 import common_pb2, generate_pb2, rollout_pb2
from penstock.weights.named_weights import NamedWeights
from services.rollout.engine.config import RolloutConfig
from services.rollout.testing.engine_process import EngineProcess, log_events
from tests.support.engine.adapters import with_adapters
from tests.support.engine.pd_pairs import Pair, PairHost, missing_for_pairs, pair_host
from tests.support.engine.publisher import engine_publisher
from tests.support.engine.push import Push
from tests.support.engine.reference import (
    TOLERANCE,
    Reference,
    picture,
    prompt,
    request,
    require_logprobs,
    until_replica,
)
from tests.support.engine.rest import until_at_rest
from tests.support.engine.traffic import Traffic
from tests.support.router.routers import router
from tests.support.waiting import until
from tests.support.weights.publishing import watching

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("rendezvous", "engine_forker"),
    pytest.mark.leaves_behind("SGLang leaves the files of its sockets in TMPDIR", "file"),
]

BACKEND_VARIABLE = "PENSTOCK_TEST_TRANSFER_BACKEND"
BACKEND = os.environ.get(BACKEND_VARIABLE, "nixl")
TENSOR_PARALLEL = int(os.environ.get("PENSTOCK_TEST_TENSOR_PARALLEL", "1"))
PICTURES = {"text": [], "image": [picture(150, 101, seed=1)], "two images": [picture(96, 96), picture(60, 200, seed=2)]}


@pytest.fixture(scope="module")
async def host(
    engine: EngineProcess,
    tiny_model_path: Path,
    nats_url: str,
    tmp_path_factory: pytest.TempPathFactory,
    reference: Reference,
) -> AsyncIterator[PairHost]:
    """One pair for all tests here, in the run of the unified engine."""
    if missing := await asyncio.to_thread(missing_for_pairs, BACKEND):
        pytest.fail(missing)
    folder = tmp_path_factory.mktemp("pairs")
    settings: dict[str, Any] = {
        "transfer_backend": BACKEND,
        "max_running": 32,
        "context_length": 1024,
        "grace_s": 2.0,
        "tensor_parallel": TENSOR_PARALLEL,
    }
    with pytest.MonkeyPatch.context() as environment:
        # Of the cache of a request whose prefill engine died; a push waits for it, and by default that takes 30 s.
        environment.setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT", "2")
        async with pair_host(tiny_model_path, nats_url, folder, run_of(engine), reference, **settings) as host:
            yield host


def run_of(engine: EngineProcess) -> str:
    """The run's name, which is its folder's."""
    return engine.log.parent.name


@pytest.fixture
async def pair(host: PairHost) -> Pair:
    """A pair with a policy of its own, whatever the test before did to it."""
    return await host.pair()


def turn(kind: str, *, max_new_tokens: int, temperature: float = 1.0, seed: int = 0) -> generate_pb2.GenerateRequest:
    """A turn with the pictures of `kind`."""
    images = PICTURES[kind]
    ids = prompt(random.Random(f"{kind} {seed}"), num_images=len(images), image_id=366)
    return request(ids, images, max_new_tokens=max_new_tokens, temperature=temperature)


async def share_policy(engine: EngineProcess, pair: Pair) -> int:
    """Have the unified engine hold the pair's policy too, under the same version, which is returned."""
    version = 1 + max([(await each.replica()).policy_version for each in (engine, *pair.engines)])
    await Push(engine, pair.policy.weights, version).complete()
    return await pair.push(pair.policy, version=version)


def require_code(error: object, code: grpc.StatusCode) -> None:
    assert isinstance(error, grpc.aio.AioRpcError), error
    assert error.code() == code, error


@pytest.mark.parametrize("kind", ["text", "image", pytest.param("two images", marks=pytest.mark.slow)])
async def test_a_pair_is_a_unified_engine(engine: EngineProcess, pair: Pair, kind: str) -> None:
    """Greedy: the same ids and logprobs, unary and streamed. Sampled: the logprobs of transformers."""
    version = await share_policy(engine, pair)
    for seed in range(3):
        made = turn(kind, max_new_tokens=40, temperature=0.0, seed=seed)
        unified = await engine.generation.Generate(made, timeout=60)
        streamed = ResumableTurn(made)
        await pair.play(streamed)
        unary = await pair.generate(made)
        for answer in (unary, streamed.response()):
            assert answer.output_ids == unified.output_ids
            assert (torch.tensor(answer.logprobs) - torch.tensor(unified.logprobs)).abs().max() < TOLERANCE
            assert answer.finish_reason == unified.finish_reason
            assert answer.usage.num_prompt_tokens == unified.usage.num_prompt_tokens
            assert answer.usage.num_output_tokens == unified.usage.num_output_tokens
            assert answer.replica_id == (await pair.decode.replica()).replica_id
            assert [span.policy_version for span in answer.version_spans] == [version]
        assert unary.usage.num_cached_tokens > 0, "the prefill engine's prefix cache is of use"
    for temperature in (1.0, 0.7):
        made = turn(kind, max_new_tokens=40, temperature=temperature)
        for answer in await asyncio.gather(*(pair.generate(made) for _ in range(6))):
            require_logprobs({version: pair.policy}, made, answer)


async def test_a_prefill_engine_answers_with_the_first_token(pair: Pair) -> None:
    """As soon as its part is done, the KV cache handed over."""
    num_tokens = 0
    for seed in range(10):  # the policy is drawn at random, and may end an answer at once
        given = await pair.bootstrapped(turn("image", max_new_tokens=300, temperature=0.0, seed=seed))
        decoding = pair.decode.generation.GenerateStream(given, timeout=60)
        first = await pair.prefill.generation.Generate(given, timeout=60)
        rest = [chunk async for chunk in decoding]
        assert list(first.output_ids) == list(rest[0].output_ids)[:1]
        if (num_tokens := sum(len(chunk.output_ids) for chunk in rest)) > 1:
            break
    assert num_tokens > 1


async def test_leases_tell_what_a_pair_needs_to_know(engine: EngineProcess, pair: Pair, nats_url: str) -> None:
    """Role, transfer back end, parallelism, where to fetch the KV; load while requests run."""
    prefill, decode = [await engine.replica() for engine in pair.engines]
    assert (prefill.role, decode.role) == (common_pb2.REPLICA_ROLE_PREFILL, common_pb2.REPLICA_ROLE_DECODE)
    for replica in (prefill, decode):
        assert (replica.disaggregation.transfer_backend, replica.disaggregation.tensor_parallel) == (
            BACKEND,
            TENSOR_PARALLEL,
        )
        assert 0 < replica.max_tokens < 1024
    assert (prefill.disaggregation.bootstrap_host, decode.disaggregation.bootstrap_host) == ("127.0.0.1", "")
    assert prefill.disaggregation.bootstrap_port > 0 == decode.disaggregation.bootstrap_port
    async with connect(BusConfig(url=nats_url), run=run_of(engine)) as bus, watching(bus) as watch:
        await until(lambda: {prefill.replica_id, decode.replica_id} <= watch.values.keys())
        for replica in (prefill, decode):
            leased = read_replica(replica.replica_id, watch.values[replica.replica_id])
            assert leased is not None
            assert (leased.role, leased.disaggregation) == (replica.role, replica.disaggregation)
    made = [turn("text", max_new_tokens=900, seed=seed) for seed in range(24)]
    for each in made:
        each.sampling.ignore_end = True
    running = [asyncio.ensure_future(pair.generate(each)) for each in made]
    busy = await until_replica(pair.decode, lambda replica: replica.num_running >= 6 and replica.kv_use > 0)
    assert busy.num_running + busy.num_queued <= 24
    for call in running:
        call.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    # Nothing of what was given up is left in either: SGLang's queues are empty, or else no push would be taken.
    for peer in pair.engines:
        await until_replica(peer, lambda replica: replica.num_running == replica.num_queued == replica.kv_use == 0)
    await pair.push(pair.policy)


async def test_a_pair_without_work_leaves_the_cores_to_others(pair: Pair) -> None:
    """Also when KV has travelled: neither loops nor the threads of the transfer back end turn without a rest."""
    assert (await pair.generate(turn("text", max_new_tokens=2))).output_ids
    for each in pair.engines:
        await until_at_rest(each)


async def test_pairs_that_cannot_be_are_refused(engine: EngineProcess, pair: Pair) -> None:
    """No pair, an impossible one, one for a unified engine, and one chosen for another version."""
    made = request([1, 2, 3], max_new_tokens=2)
    sound = await pair.bootstrapped(made)
    wrong: list[tuple[EngineProcess, generate_pb2.GenerateRequest, str]] = [(engine, sound, "this engine is unified")]
    for peer in pair.engines:
        wrong.append((peer, made, "bootstrap is missing"))
        for field, value in (("host", ""), ("host", "2.2.2.2"), ("port", 0), ("room", 0), ("room", 1 << 62)):
            bad = await pair.bootstrapped(made)
            setattr(bad.bootstrap, field, value)
            wrong.append((peer, bad, f"bootstrap.{field} = "))
    for peer, bad, message in wrong:
        with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
            await peer.generation.Generate(bad, timeout=10)
        require_code(caught.value, grpc.StatusCode.INVALID_ARGUMENT)
    stale = await pair.bootstrapped(made, version=await pair.version() - 1)
    for peer in pair.engines:
        with pytest.raises(grpc.aio.AioRpcError, match="choose another pair") as caught:
            await peer.generation.Generate(stale, timeout=10)
        require_code(caught.value, grpc.StatusCode.FAILED_PRECONDITION)
    assert (await pair.generate(made)).output_ids


@pytest.mark.parametrize(
    ("first", "mode"),
    [
        ("prefill", "PAUSE_MODE_IN_PLACE"),
        pytest.param("decode", "PAUSE_MODE_RETRACT", marks=pytest.mark.slow),
    ],
)
async def test_a_push_ends_what_runs_and_the_rest_is_played_under_the_new_version(
    pair: Pair, first: str, mode: str
) -> None:
    """What was delivered stays; each token has its version's logprobs; pictures seen before are seen anew."""
    version, older = await pair.version(), pair.policy
    made = [turn(kind, max_new_tokens=400, seed=seed) for kind in PICTURES for seed in range(3)]
    for each in made:
        each.sampling.ignore_end = True  # none ends while the first engine pauses
    for each in made[::3]:  # what caches there are hold these prompts and pictures
        each.sampling.max_new_tokens = 1
        await pair.generate(each)
        each.sampling.max_new_tokens = 400
    newer = older.perturbed(seed=11)
    pushed = [pair.prefill, pair.decode][:: 1 if first == "prefill" else -1]
    pushes = [Push(engine, newer.weights, version + 1, mode=rollout_pb2.PauseMode.Value(mode)) for engine in pushed]
    for push in pushes:
        await push.prepare()
    turns: list[ResumableTurn] = []

    async def play_another(index: int) -> None:
        turns.append(ResumableTurn(made[index % len(made)]))
        await pair.play(turns[-1], version=version)

    traffic = Traffic(play_another, len(made))
    await until(lambda: sum(each.num_tokens > 0 and not each.is_finished for each in turns) >= 4)
    for push in pushes:  # both at once: what decodes may have ended when the first engine has its weights
        await push.pause()
    traffic.stop()
    for engine, push in zip(pushed, pushes, strict=True):
        waiting = [
            asyncio.ensure_future(
                engine.generation.Generate(await pair.bootstrapped(made[0], version=each), timeout=60)
            )
            for each in (version, version + 1)
        ]
        await push.transfer()
        assert not any(call.done() for call in waiting), "while weights change, requests wait"
        await push.commit()
        await asyncio.to_thread(push.group.close)
        with pytest.raises(grpc.aio.AioRpcError, match=f"this engine serves version {version + 1}") as caught:
            await waiting[0]
        require_code(caught.value, grpc.StatusCode.FAILED_PRECONDITION)
        waiting[1].cancel()  # it has no peer
    results = await asyncio.gather(*traffic.calls, return_exceptions=True)
    interrupted = [each for each in turns if not each.is_finished]
    assert sum(each.num_tokens > 0 for each in interrupted) >= 2
    for played, error in zip(turns, results, strict=True):
        if not played.is_finished:
            # What waited at an engine while weights changed is refused as `waiting` is; what ran is cut off.
            refused = played.num_tokens == 0 and "this engine serves version" in str(error)
            require_code(error, grpc.StatusCode.FAILED_PRECONDITION if refused else grpc.StatusCode.UNAVAILABLE)
    await asyncio.gather(*(pair.play(each) for each in interrupted))
    for index, played in enumerate(turns):
        require_logprobs({version: older, version + 1: newer}, made[index % len(made)], played.response())
    for kind in PICTURES:  # the very same pictures again
        again = turn(kind, max_new_tokens=24)
        answer = await pair.generate(again)
        assert [span.policy_version for span in answer.version_spans] == [version + 1]
        require_logprobs({version + 1: newer}, again, answer)


@pytest.mark.parametrize("transport", ["shared_memory", "disk", "delta"])
async def test_a_pair_takes_weights_over_each_transport(
    engine: EngineProcess, pair: Pair, nats_url: str, tmp_path: Path, transport: str
) -> None:
    """With the trainer's own publisher, twice, and then as adapters, which both peers merge into what they hold; each
    time the pair's tokens have the new version's logprobs. The tests above broadcast."""
    made = turn("image", max_new_tokens=16)
    files_dir = tmp_path / "weights" if transport == "disk" else None
    version = max([(await each.replica()).policy_version for each in (engine, *pair.engines)])
    async with (
        connect(BusConfig(url=nats_url), run=run_of(engine)) as bus,
        watching(bus) as watch,
        engine_publisher(watch, files_dir=files_dir, transport=transport) as publisher,
    ):
        replica_ids = {(await each.replica()).replica_id for each in (engine, *pair.engines)}
        await until(lambda: replica_ids <= watch.values.keys())
        policies = [pair.policy.perturbed(seed) for seed in (21, 22)]
        pushed = [(NamedWeights.of(policy.weights), policy) for policy in policies]
        for weights, policy in (*pushed, with_adapters(policies[-1], seed=23)):
            version += 1
            assert (await publisher.publish(publisher.take(version, weights))).num_failed == 0
            assert await pair.version() == version
            require_logprobs({version: policy}, made, await pair.generate(made))
    for each in pair.engines:
        received = [event["transport"] for event in log_events(each.log) if event["event"] == "weights.received"]
        assert received[-3:] == [transport] * 3


async def test_a_push_that_breaks_off_leaves_no_peer_waiting(engine: EngineProcess, pair: Pair) -> None:
    """Aborted before weights were touched: what waited goes on under the old version."""
    made = turn("image", max_new_tokens=24)
    push = Push(pair.decode, pair.policy.perturbed(5).weights, await pair.version() + 1)
    await push.prepare()
    await push.pause()
    playing = asyncio.ensure_future(pair.generate(made))
    for peer in pair.engines:
        await until_replica(peer, lambda replica: replica.num_running == 1)
    for _ in range(2):  # the pair, were it not paused, would answer in this time; after 10 s its peer gives up
        await engine.generation.Generate(made, timeout=60)
    assert not playing.done()
    assert await push.abort("changed its mind") == common_pb2.REPLICA_STATE_READY
    await asyncio.to_thread(push.group.close)
    require_logprobs({await pair.version(): pair.policy}, made, await playing)


@pytest.mark.slow
async def test_a_peer_alone_gives_up_in_seconds(pair: Pair) -> None:
    """Without its decode engine, its prefill engine, or any at the address: UNAVAILABLE; the next pair is served."""
    made = turn("text", max_new_tokens=8)
    nowhere = await pair.bootstrapped(made)
    nowhere.bootstrap.port = 1
    alone = [
        (pair.prefill, await pair.bootstrapped(made)),
        (pair.decode, await pair.bootstrapped(made)),
        (pair.decode, nowhere),
    ]
    # Whoever takes longer fails with another code.
    calls = [engine.generation.Generate(given, timeout=3 * RolloutConfig().pair_deadline_s) for engine, given in alone]
    results = await asyncio.gather(*calls, return_exceptions=True)
    for error in results:
        require_code(error, grpc.StatusCode.UNAVAILABLE)
        assert "its peer is late or gone" in str(error)
    require_logprobs({await pair.version(): pair.policy}, made, await pair.generate(made))
    await pair.push(pair.policy.perturbed(6))  # which needs both to be empty


def kill(engine: EngineProcess) -> None:
    """As if the machine had gone."""
    os.killpg(engine.process.pid, signal.SIGKILL)


@pytest.mark.kills_engine
async def test_a_prefill_engine_that_dies_takes_nothing_along_that_decodes_already(pair: Pair) -> None:
    """Streams that run go on to their end; what it had not handed over fails at once or in seconds."""
    made = [turn(kind, max_new_tokens=200, seed=seed) for kind in PICTURES for seed in range(2)]
    turns = [ResumableTurn(each) for each in made]
    requests = [await pair.bootstrapped(each.remaining()) for each in turns]
    handed_over = await asyncio.gather(*(_begin(pair, given) for given in requests))
    late = await pair.bootstrapped(turn("text", max_new_tokens=8, seed=9))
    version, policy = await pair.version(), pair.policy
    kill(pair.prefill)
    failing = asyncio.ensure_future(pair.decode.generation.Generate(late, timeout=60))
    for each, stream in zip(turns, handed_over, strict=True):
        async for chunk in stream:
            each.add(chunk)
    for request_, each in zip(made, turns, strict=True):
        require_logprobs({version: policy}, request_, each.response())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await failing
    require_code(caught.value, grpc.StatusCode.UNAVAILABLE)
    await pair.prefill.process.wait()


async def _begin(pair: Pair, given: generate_pb2.GenerateRequest) -> Any:
    stream = pair.decode.generation.GenerateStream(given, timeout=60)
    await pair.prefill.generation.Generate(given, timeout=60)
    return stream


@pytest.mark.slow
@pytest.mark.kills_engine
async def test_a_decode_engine_that_drains_or_dies_leaves_its_prefill_engine_well(pair: Pair) -> None:
    """Drained, it hands over what it has, and nothing failed; killed, the requests that wait for it fail in seconds."""
    turns: list[ResumableTurn] = []

    async def play_another(index: int) -> None:
        turns.append(ResumableTurn(turn("text", max_new_tokens=900, seed=index)))
        await pair.play(turns[-1])

    traffic = Traffic(play_another, 8)
    await until(lambda: sum(each.num_tokens > 0 and not each.is_finished for each in turns) >= 4)
    traffic.stop()
    await pair.decode.control.DrainReplica(rollout_pb2.DrainReplicaRequest(grace_s=0.0), timeout=60)
    ends = zip(await asyncio.gather(*traffic.calls, return_exceptions=True), turns, strict=True)
    handed_over = [(error, each) for error, each in ends if not each.is_finished]
    for error, each in handed_over:  # without a token, a call may also have failed at the prefill engine
        drains = each.num_tokens > 0 or "drain" in str(error).lower()
        require_code(error, grpc.StatusCode.FAILED_PRECONDITION if drains else grpc.StatusCode.UNAVAILABLE)
    assert any(each.num_tokens > 0 for _, each in handed_over)
    requests = [await pair.bootstrapped(each.remaining()) for each in turns if not each.is_finished]
    waiting = [asyncio.ensure_future(pair.prefill.generation.Generate(given, timeout=60)) for given in requests]
    kill(pair.decode)
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        require_code(error, grpc.StatusCode.UNAVAILABLE)
    await until_replica(pair.prefill, lambda replica: replica.num_running == replica.num_queued == 0)
    await pair.decode.process.wait()


@pytest.mark.slow
@pytest.mark.kills_engine
async def test_a_run_loses_nothing_when_both_peers_are_killed(engine: EngineProcess, pair: Pair, nats_url: str) -> None:
    """Real router, kill -9 of the prefill and then of the decode engine in mid-flight: the caller sees one answer, and
    each token has the policy's logprob; pairs and the unified engine had their part in it."""
    version = await share_policy(engine, pair)
    made = [turn(kind, max_new_tokens=300, seed=seed) for kind in PICTURES for seed in range(5)]
    async with connect(BusConfig(url=nats_url), run=run_of(engine)) as bus, router(bus) as caller:
        await caller.until(lambda pool: sum(each.routable for each in pool.replicas) == 3)

        async def play_another(index: int) -> generate_pb2.GenerateResponse:
            each = made[index % len(made)]
            fields = {"input_ids": each.input_ids, "images": each.images, "sampling": each.sampling}
            return await caller.generate(str(index), timeout_s=200.0, **fields)

        traffic = Traffic(play_another, len(made))
        await until_replica(pair.decode, lambda replica: replica.num_running >= 2 and replica.kv_use > 0)
        kill(pair.prefill)
        await pair.prefill.process.wait()
        kill(pair.decode)  # while turns of the first are moved
        traffic.stop()
        answers = await asyncio.gather(*traffic.calls)
    for index, answer in enumerate(answers):
        assert answer.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED
        require_logprobs({version: pair.policy}, made[index % len(made)], answer)
    for each in pair.engines:
        await each.process.wait()
