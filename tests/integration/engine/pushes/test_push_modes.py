"""What becomes of requests when weights change under them: retracted, continued or drained, and never mislabelled."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
import torch

from penstock.v1 import common_pb2, generate_pb2, rollout_pb2
from services.rollout.testing.engine_process import EngineProcess
from tests.support.engine.push import Push
from tests.support.engine.reference import TOLERANCE, Reference, picture, prompt, request, until_replica
from tests.support.engine.rest import until_at_rest
from tests.support.engine.traffic import Traffic

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("rendezvous")]

IN_PLACE, DRAIN = rollout_pb2.PAUSE_MODE_IN_PLACE, rollout_pb2.PAUSE_MODE_DRAIN
IMAGES = [picture(150, 101, seed=1)]


def spans_of(answer: generate_pb2.GenerateResponse) -> list[tuple[int, int]]:
    """(policy version, number of tokens)."""
    spans = [(span.policy_version, span.num_tokens) for span in answer.version_spans]
    assert sum(length for _, length in spans) == len(answer.output_ids) == len(answer.logprobs)
    return spans


def assert_from(policy: Reference, ids: Sequence[int], images: Sequence[bytes], answer: Any) -> None:
    """All tokens have the policy's logprobs."""
    expected, _ = policy.logprobs(ids, images, answer.output_ids, temperature=1.0)
    assert (torch.tensor(list(answer.logprobs)) - expected).abs().max() < TOLERANCE


async def started(
    engine: EngineProcess, wanted: generate_pb2.GenerateRequest, num: int
) -> Traffic[generate_pb2.GenerateResponse]:
    """Calls that have begun to generate, as many as fit."""
    traffic = Traffic(lambda _: engine.generation.Generate(wanted, timeout=120), num)
    await traffic.under_way()
    return traffic


@pytest.mark.parametrize(
    "images",
    [pytest.param([], id="text", marks=pytest.mark.slow), pytest.param(IMAGES, id="image")],
)
async def test_in_place_goes_on_from_what_the_old_weights_computed(
    engine: EngineProcess, current: Reference, images: list[bytes]
) -> None:
    """Tokens of the old span have the old policy's logprobs, those of the new span the new policy's over the old KV."""
    version = (await engine.replica()).policy_version
    ids = prompt(random.Random(2), num_images=len(images), image_id=current.image_id)
    newer = current.perturbed(seed=3)
    push = Push(engine, newer.weights, version + 1, mode=IN_PLACE)
    await push.prepare()
    traffic = await started(engine, request(ids, images, max_new_tokens=160), 24)
    await push.pause()
    traffic.stop()
    await push.deliver()
    seen = []
    for answer in await asyncio.gather(*traffic.calls):
        spans = spans_of(answer)
        num_old = spans[0][1] if spans[0][0] == version else 0
        assert [number for number, _ in spans] in ([version], [version, version + 1], [version + 1])
        expected = (
            current.logprobs_over_change(newer, ids, images, answer.output_ids, num_old)
            if num_old
            else newer.logprobs(ids, images, answer.output_ids, temperature=1.0)[0]
        )
        assert (torch.tensor(list(answer.logprobs)) - expected).abs().max() < TOLERANCE
        if len(spans) == 2:
            anew, _ = newer.logprobs(ids, images, answer.output_ids, temperature=1.0)
            seen.append((spans, (torch.tensor(list(answer.logprobs)) - anew)[num_old:].abs().max()))
    # A token or two may be as likely over either KV, and show nothing.
    assert sum(difference > TOLERANCE for _, difference in seen) >= 4, seen


@pytest.mark.parametrize(
    ("mode", "images"),
    [
        pytest.param("PAUSE_MODE_RETRACT", IMAGES, id="RETRACT, image"),
        pytest.param("PAUSE_MODE_IN_PLACE", IMAGES, id="IN_PLACE, image", marks=pytest.mark.slow),
        pytest.param("PAUSE_MODE_DRAIN", [], id="DRAIN, text", marks=pytest.mark.slow),
        pytest.param("PAUSE_MODE_RETRACT", [], id="RETRACT, text", marks=pytest.mark.variant),
        pytest.param("PAUSE_MODE_IN_PLACE", [], id="IN_PLACE, text", marks=pytest.mark.variant),
        pytest.param("PAUSE_MODE_DRAIN", IMAGES, id="DRAIN, image", marks=pytest.mark.variant),
    ],
)
async def test_nothing_computed_by_older_weights_serves_a_new_request(
    engine: EngineProcess, current: Reference, mode: str, images: list[bytes]
) -> None:
    """Shared prefixes, pictures, turns that follow earlier answers, and requests that waited while weights changed."""
    version = (await engine.replica()).policy_version
    ids = prompt(random.Random(3), num_images=len(images), image_id=current.image_id, length=60)
    before = await engine.generation.Generate(request(ids, images), timeout=60)
    again = await engine.generation.Generate(request(ids, images), timeout=60)
    assert again.usage.num_cached_tokens > before.usage.num_cached_tokens == 0
    newer = current.perturbed(seed=4)
    push = Push(engine, newer.weights, version + 1, mode=rollout_pb2.PauseMode.Value(mode), drain_s=0.1)
    await push.prepare()
    traffic = await started(engine, request(ids, images, max_new_tokens=160), 56)  # 24 more than can run
    await push.pause()
    traffic.stop()
    late = [asyncio.ensure_future(engine.generation.Generate(request(ids, images), timeout=120)) for _ in range(4)]
    await push.deliver()
    answers = await asyncio.gather(*traffic.calls)
    mixed = next(answer for answer in answers if len(answer.version_spans) == 2)
    for answer in await asyncio.gather(*late):
        assert spans_of(answer) == [(version + 1, len(answer.output_ids))]
        assert_from(newer, ids, images, answer)
    for answer in answers:
        if spans_of(answer)[0][0] == version + 1:
            assert_from(newer, ids, images, answer)
    num_new = sum(spans_of(answer)[0][0] == version + 1 for answer in answers)
    assert num_new >= 4
    for followed in (before, mixed):
        turn = [*ids, *followed.output_ids, 7, 8]
        for _ in range(2):
            answer = await engine.generation.Generate(request(turn, images), timeout=60)
            assert spans_of(answer) == [(version + 1, len(answer.output_ids))]
            assert_from(newer, turn, images, answer)
        assert answer.usage.num_cached_tokens > len(turn) // 2  # within a version, prefixes are shared as ever


@pytest.mark.slow
async def test_in_place_computes_a_half_computed_prompt_anew(engine: EngineProcess, current: Reference) -> None:
    """Long prompts, computed in parts, while one push follows another: every token has its version's logprobs."""
    version = (await engine.replica()).policy_version
    rng = random.Random(5)
    prompts: list[list[int]] = []
    calls: list[asyncio.Future[generate_pb2.GenerateResponse]] = []
    policies = {version: current}
    for _ in range(3):
        added = [[rng.randrange(300) for _ in range(1000)] for _ in range(20)]
        prompts += added
        calls += [
            asyncio.ensure_future(engine.generation.Generate(request(ids, max_new_tokens=1), timeout=120))
            for ids in added
        ]
        version += 1
        policies[version] = current.perturbed(seed=version)
        await Push(engine, policies[version].weights, version, mode=IN_PLACE).complete()
    for ids, answer in zip(prompts, await asyncio.gather(*calls), strict=True):
        ((number, _),) = spans_of(answer)
        assert_from(policies[number], ids, [], answer)
    await engine.generation.Generate(request([1, 2, 3]), timeout=60)


async def test_drain_lets_requests_finish_under_the_weights_they_began_with(
    engine: EngineProcess, current: Reference
) -> None:
    """One span each, while those that come meanwhile wait for the new weights."""
    version = (await engine.replica()).policy_version
    ids = prompt(random.Random(6), num_images=1, image_id=current.image_id)
    newer = current.perturbed(seed=6)
    push = Push(engine, newer.weights, version + 1, mode=DRAIN, drain_s=60.0)
    await push.prepare()
    traffic = await started(engine, request(ids, IMAGES, max_new_tokens=160), 24)
    pushing = asyncio.ensure_future(push.finish())
    await until_replica(engine, lambda replica: replica.state == common_pb2.REPLICA_STATE_UPDATING)
    traffic.stop()
    late = await engine.generation.Generate(request(ids, IMAGES), timeout=120)
    assert spans_of(late) == [(version + 1, len(late.output_ids))]
    assert_from(newer, ids, IMAGES, late)
    await pushing
    policies = {version: current, version + 1: newer}
    numbers = []
    for answer in await asyncio.gather(*traffic.calls):
        ((number, _),) = spans_of(answer)
        assert_from(policies[number], ids, IMAGES, answer)
        numbers.append(number)
    assert numbers.count(version) >= 12


@pytest.mark.slow
async def test_a_drain_that_is_given_up_lets_waiting_requests_go_on(engine: EngineProcess, current: Reference) -> None:
    """The trainer vanishes while it waits: the old weights serve on, those that waited included."""
    version = (await engine.replica()).policy_version
    push = Push(engine, current.perturbed(7).weights, version + 1, mode=DRAIN, drain_s=60.0)
    await push.prepare()
    traffic = await started(engine, request([3, 4, 5], max_new_tokens=400), 32)
    pausing = asyncio.ensure_future(push.pause())
    await until_replica(engine, lambda replica: replica.state == common_pb2.REPLICA_STATE_UPDATING)
    late = asyncio.ensure_future(engine.generation.Generate(request([3, 4, 5]), timeout=60))
    pausing.cancel()
    traffic.stop()
    assert spans_of(await late)[0][0] == version
    for answer in await asyncio.gather(*traffic.calls):
        assert_from(current, [3, 4, 5], [], answer)
    await asyncio.to_thread(push.group.close)
    assert (await engine.replica()).state == common_pb2.REPLICA_STATE_READY


async def test_a_broken_push_in_place_is_healed_in_place(engine: EngineProcess, current: Reference) -> None:
    """Requests that ran have failed, and nothing that they left behind serves a later one."""
    version = (await engine.replica()).policy_version
    ids = prompt(random.Random(8), num_images=1, image_id=current.image_id, length=60)
    push = Push(engine, current.perturbed(8).weights, version + 1, bucket_bytes=200_000, mode=IN_PLACE)
    await push.prepare()
    traffic = await started(engine, request(ids, IMAGES, max_new_tokens=160), 32)
    await push.pause()
    traffic.stop()
    with pytest.raises(grpc.aio.AioRpcError):
        await push.break_off()
    assert (await engine.replica()).state == common_pb2.REPLICA_STATE_BROKEN
    results = await asyncio.gather(*traffic.calls, return_exceptions=True)
    failed = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
    # Those that traffic began in the moment of the pause may still have waited for their picture to be decoded.
    refused = [error for error in failed if error.code() == grpc.StatusCode.FAILED_PRECONDITION]
    assert all("this engine is REPLICA_STATE_BROKEN" in str(error.details()) for error in refused)
    ran = [error for error in failed if error not in refused]
    assert ran
    assert {error.code() for error in ran} == {grpc.StatusCode.UNAVAILABLE}
    newer = current.perturbed(9)
    await Push(engine, newer.weights, version + 1, mode=IN_PLACE).complete()
    for _ in range(2):
        answer = await engine.generation.Generate(request(ids, IMAGES), timeout=60)
        assert spans_of(answer) == [(version + 1, len(answer.output_ids))]
        assert_from(newer, ids, IMAGES, answer)


async def test_an_engine_that_has_paused_leaves_the_cores_to_others(engine: EngineProcess, current: Reference) -> None:
    """Whoever sends or loads weights needs them; SGLang's own loop would turn without a rest."""
    push = Push(engine, current.weights, (await engine.replica()).policy_version + 1)
    await push.prepare()
    await push.pause()
    try:
        await until_at_rest(engine)
    finally:
        for stage in (push.transfer, push.commit):
            await stage()
        await asyncio.to_thread(push.group.close)
