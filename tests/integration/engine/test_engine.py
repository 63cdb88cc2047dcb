"""The rollout engine against transformers: a real process with real SGLang and a random tiny Qwen3-VL."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from penstock.bus.connection import connect
from penstock.bus.span_stream import SpanReader
from penstock.config import BusConfig
from penstock.v1 import common_pb2, generate_pb2
from services.rollout.testing.engine_process import EngineProcess
from tests.support.engine.push import Push
from tests.support.engine.reference import (
    END_ID,
    IMAGE_ID,
    START_ID,
    TOLERANCE,
    VIDEO_ID,
    Reference,
    assert_freed,
    long_request,
    picture,
    prompt,
    request,
    until_replica,
)
from tests.support.engine.traffic import Traffic
from tests.support.waiting import HANG_S, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("rendezvous")]

IMAGES = {
    "none": [],
    "grid": [picture(96, 96)],
    "two": [picture(96, 96), picture(150, 101, seed=1)],
    "large": [picture(1600, 700)],
    "narrow": [picture(60, 900)],
    "palette": [picture(200, 130, mode="P")],
    "palette with transparency": [picture(200, 130, mode="P-transparent")],
    "rgba": [picture(120, 120, mode="RGBA")],
    "grey with alpha": [picture(120, 120, mode="LA")],
    "one bit": [picture(120, 120, mode="1")],
    "cmyk jpeg": [picture(120, 120, mode="CMYK", format="JPEG")],
    "gif": [picture(120, 120, mode="P", format="GIF")],
    "webp": [picture(120, 120, format="WEBP")],
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_transformers(
    engine: EngineProcess, current: Reference, temperature: float
) -> None:
    """Text and images of all kinds: the tempered distribution without the forbidden ids, to rounding."""
    rng = random.Random(1)
    prompts = {name: prompt(rng, num_images=len(images), image_id=current.image_id) for name, images in IMAGES.items()}
    answers = await asyncio.gather(
        *(
            engine.generation.Generate(request(prompts[name], IMAGES[name], temperature=temperature), timeout=60)
            for name in IMAGES
        )
    )
    version = (await engine.replica()).policy_version
    for name, answer in zip(IMAGES, answers, strict=True):
        expected, prompt_length = current.logprobs(
            prompts[name], IMAGES[name], answer.output_ids, temperature=temperature
        )
        assert answer.usage.num_prompt_tokens == prompt_length, name
        assert answer.usage.num_output_tokens == len(answer.output_ids) == len(answer.logprobs), name
        assert (torch.tensor(list(answer.logprobs)) - expected).abs().max() < TOLERANCE, name
        assert [(span.num_tokens, span.policy_version) for span in answer.version_spans] == [
            (len(answer.output_ids), version)
        ], name


@pytest.mark.parametrize("num_sampled", [0, 6], ids=["alone", "beside samples"])
async def test_temperature_zero_is_greedy(engine: EngineProcess, current: Reference, num_sampled: int) -> None:
    """Each id is the likeliest one, also in a batch with sampled requests; logprobs are of the distribution at 1."""
    rng = random.Random(2)
    names = ("none", "grid", "two")
    prompts = {name: prompt(rng, num_images=len(IMAGES[name]), image_id=current.image_id) for name in names}
    sampled = [request(prompts["none"], max_new_tokens=60) for _ in range(num_sampled)]
    greedy = [request(prompts[name], IMAGES[name], max_new_tokens=40, temperature=0.0) for name in names]
    answers = await asyncio.gather(*(engine.generation.Generate(each, timeout=60) for each in (*sampled, *greedy)))
    for name, answer in zip(names, answers[num_sampled:], strict=True):
        scores, _ = current.logprobs(prompts[name], IMAGES[name], answer.output_ids, temperature=1.0)
        highest = current.highest_logprobs(prompts[name], IMAGES[name], answer.output_ids)
        assert (highest - scores).max() < TOLERANCE, name
        assert (torch.tensor(list(answer.logprobs)) - scores).abs().max() < TOLERANCE, name


async def test_a_call_says_how_long_it_waited_and_was_prefilled(engine: EngineProcess, nats_url: str) -> None:
    """In its span, where SGLang measures itself: both take some time, and together no more than the call."""
    asked = [request([5, 6, 7, number], max_new_tokens=20) for number in range(8)]
    for number, each in enumerate(asked):
        each.request_id = f"timed-{number}"
    await asyncio.gather(*(engine.generation.Generate(each, timeout=60) for each in asked))
    calls: dict[str, tuple[float, dict[str, Any]]] = {}
    async with connect(BusConfig(url=nats_url), run=engine.log.parent.name) as bus:
        reader = SpanReader(bus)

        async def are_there() -> bool:
            for batch in await reader.read():
                for name, _, seconds, about in json.loads(batch.payload)["spans"]:
                    if name == "call":
                        calls[about["request"]] = seconds, about
            return all(each.request_id in calls for each in asked)

        await until(are_there)
        await reader.close()
    for each in asked:
        seconds, about = calls[each.request_id]
        assert min(about["queued_s"], about["prefill_s"]) > 0.0
        assert about["queued_s"] + about["prefill_s"] <= seconds


async def test_generation_ends_at_the_models_and_the_requests_stop_ids(
    engine: EngineProcess, tiny_model_path: Path
) -> None:
    """The stop token is the last id; without one, the length ends it."""
    from penstock.model.tokens import end_token_ids

    answers = await asyncio.gather(
        *(engine.generation.Generate(request([5, 6, 7], max_new_tokens=200), timeout=60) for _ in range(24))
    )
    ends = set(end_token_ids(tiny_model_path))
    reasons = {answer.finish_reason for answer in answers}
    assert generate_pb2.FINISH_REASON_STOP in reasons
    for answer in answers:
        stopped = answer.finish_reason == generate_pb2.FINISH_REASON_STOP
        assert (answer.output_ids[-1] in ends) == stopped
        assert not ends.intersection(answer.output_ids[:-1])
        assert stopped or len(answer.output_ids) == 200
    stop = request([5, 6, 7], max_new_tokens=200)
    stop.sampling.stop_token_ids.extend(range(300))
    answer = await engine.generation.Generate(stop, timeout=60)
    assert answer.finish_reason == generate_pb2.FINISH_REASON_STOP
    assert all(token >= 300 for token in answer.output_ids[:-1])


async def test_context_length_ends_generation(engine: EngineProcess) -> None:
    """What does not fit is not generated, and that is no error."""
    for _ in range(20):
        answer = await engine.generation.Generate(
            request([7] * 1000, max_new_tokens=100_000, temperature=1.0), timeout=60
        )
        assert len(answer.output_ids) <= 24
        if answer.finish_reason == generate_pb2.FINISH_REASON_LENGTH:
            return
    raise AssertionError("always stopped by itself")


BAD = {
    "empty": (request([]), "input_ids is empty"),
    "id above": (request([1, 384]), r"input_ids\[1\] = 384 is outside the vocabulary of 384"),
    "id below": (request([1, -1]), r"input_ids\[1\] = -1 is outside"),
    "no image": (request([1, START_ID, IMAGE_ID, 2]), "1 image placeholders .* for 0 images"),
    "no placeholder": (request([1, 2], [picture(96, 96)]), "0 image placeholders .* for 1 images"),
    "expanded": (request([1, START_ID, *[IMAGE_ID] * 9, 2], [picture(96, 96)]), "exactly one per image"),
    "video": (request([1, VIDEO_ID, 2]), "videos are not supported"),
    "first": (request([IMAGE_ID, 2], [picture(96, 96)]), r"input_ids\[0\] .* does not follow a vision start"),
    "adjacent": (request([START_ID, IMAGE_ID, IMAGE_ID], [picture(96, 96)] * 2), r"input_ids\[2\] .* does not follow"),
    "no file": (request([START_ID, IMAGE_ID], [b"not an image"]), r"images\[0\] \(12 bytes\) cannot be decoded"),
    "cut short": (request([START_ID, IMAGE_ID], [picture(300, 300)[:400]]), r"images\[0\] .* cannot be decoded"),
    "empty file": (request([START_ID, IMAGE_ID], [b""]), r"images\[0\] \(0 bytes\) cannot be decoded"),
    "too narrow": (request([START_ID, IMAGE_ID], [picture(3, 900)]), r"images\[0\] is 3 x 900 pixels"),
    "too long": (request([1] * 1100), "has 1100 tokens"),
    "too long expanded": (request([START_ID, IMAGE_ID] * 22, [picture(224, 224)] * 22), "with its images expanded"),
    "no tokens": (request([1], max_new_tokens=0), "max_new_tokens = 0 must be at least 1"),
    "cold": (request([1], temperature=-1.0), "temperature = -1.0 must be 0"),
    "nan": (request([1], temperature=float("nan")), "temperature = nan must be 0"),
    "infinite": (request([1], temperature=float("inf")), "temperature = inf must be 0"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_requests_are_refused_and_the_engine_lives_on(engine: EngineProcess, name: str) -> None:
    """What would kill or hang SGLang is answered with what is wrong, and the next request is served."""
    bad, message = BAD[name]
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        await engine.generation.Generate(bad, timeout=60)
    too_long = name.startswith("too long")
    assert caught.value.code() == (grpc.StatusCode.OUT_OF_RANGE if too_long else grpc.StatusCode.INVALID_ARGUMENT)
    answer = await engine.generation.Generate(request([1, 2, 3], max_new_tokens=2), timeout=60)
    assert answer.output_ids


@pytest.mark.parametrize("field", ["top_p", "top_k", "stop_token_ids"])
async def test_bad_sampling_is_refused(engine: EngineProcess, field: str) -> None:
    """The parameters that have no sound default."""
    bad = request([1, 2, 3])
    if field == "top_p":
        bad.sampling.top_p = 0.0
    elif field == "top_k":
        bad.sampling.top_k = -3
    else:
        bad.sampling.stop_token_ids.append(10**6)
    with pytest.raises(grpc.aio.AioRpcError, match=rf"sampling\.{field}"):
        await engine.generation.Generate(bad, timeout=60)


async def test_cancellation_aborts_in_the_engine(engine: EngineProcess) -> None:
    """Calls that their callers gave up stop costing anything; so do calls whose deadline passed."""
    calls = [asyncio.ensure_future(engine.generation.Generate(long_request(), timeout=60)) for _ in range(24)]
    replica = await until_replica(engine, lambda replica: replica.num_running >= 12)
    assert replica.kv_use >= 0
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await assert_freed(engine)
    late = [asyncio.ensure_future(engine.generation.Generate(long_request(), timeout=0.3)) for _ in range(16)]
    results = await asyncio.gather(*late, return_exceptions=True)
    codes = {result.code() for result in results if isinstance(result, grpc.aio.AioRpcError)}
    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}
    await assert_freed(engine)


async def test_a_full_queue_refuses(engine: EngineProcess) -> None:
    """Above five times max_running = 160 the answer is RESOURCE_EXHAUSTED, at once."""
    calls = [asyncio.ensure_future(engine.generation.Generate(long_request(), timeout=60)) for _ in range(200)]
    done, _ = await asyncio.wait(calls, timeout=HANG_S, return_when=asyncio.FIRST_EXCEPTION)
    codes = [call.exception().code() for call in done if call.exception()]  # type: ignore[union-attr]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert codes
    assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    await until_replica(engine, lambda replica: replica.num_running == replica.num_queued == 0)


async def test_a_newer_version_than_held_is_refused(engine: EngineProcess) -> None:
    """min_policy_version is kept."""
    wanted = request([1, 2, 3])
    wanted.min_policy_version = (await engine.replica()).policy_version + 1
    with pytest.raises(grpc.aio.AioRpcError, match="min_policy_version") as caught:
        await engine.generation.Generate(wanted, timeout=60)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_push_during_generation_loses_nothing(engine: EngineProcess, current: Reference) -> None:
    """Running requests go on with the new weights; each token's logprob is that of the version it is stamped with."""
    old_version = (await engine.replica()).policy_version
    images = [picture(150, 101, seed=1)]
    ids = prompt(random.Random(2), num_images=1, image_id=current.image_id)
    newer = current.perturbed(seed=3)
    push = Push(engine, newer.weights, old_version + 5)
    await push.prepare()
    made = request(ids, images, max_new_tokens=400)
    traffic = Traffic(lambda _: engine.generation.Generate(made, timeout=120), 32)
    await traffic.under_way()
    await push.pause()
    traffic.stop()
    await push.deliver()
    answers = await asyncio.gather(*traffic.calls)
    replica = await engine.replica()
    assert (replica.policy_version, replica.state) == (old_version + 5, common_pb2.REPLICA_STATE_READY)
    num_two = 0
    for answer in answers:
        spans = [(span.policy_version, span.num_tokens) for span in answer.version_spans]
        assert sum(length for _, length in spans) == len(answer.output_ids) == len(answer.logprobs)
        num_two += len(spans) == 2
        old, _ = current.logprobs(ids, images, answer.output_ids, temperature=1.0)
        new, _ = newer.logprobs(ids, images, answer.output_ids, temperature=1.0)
        first = 0
        for version, length in spans:
            expected = old if version == old_version else new
            assert version in (old_version, old_version + 5)
            got = torch.tensor(list(answer.logprobs)[first : first + length])
            assert (got - expected[first : first + length]).abs().max() < TOLERANCE
            first += length
    assert num_two >= 4


async def test_an_epoch_keeps_its_group(engine: EngineProcess, reference: Reference) -> None:
    """Two pushes over one group, without forming it again."""
    version = (await engine.replica()).policy_version
    first = Push(engine, reference.perturbed(4).weights, version + 1)
    await first.prepare()
    for stage in (first.pause, first.transfer, first.commit):
        await stage()
    second = Push(engine, reference.perturbed(5).weights, version + 2, bucket_bytes=100_000)
    await second.prepare((first.group, first.message))
    for stage in (second.pause, second.transfer, second.commit):
        await stage()
    await asyncio.to_thread(first.group.close)
    assert (await engine.replica()).policy_version == version + 2


async def test_an_abandoned_push_leaves_the_engine_broken_and_the_next_heals_it(
    engine: EngineProcess, current: Reference
) -> None:
    """The trainer dies after the first bucket: running requests fail, nothing is served, the next push repairs it."""
    version = (await engine.replica()).policy_version
    push = Push(engine, current.perturbed(6).weights, version + 1, bucket_bytes=200_000)
    await push.prepare()
    traffic = Traffic(lambda _: engine.generation.Generate(long_request(), timeout=60), 24)
    await until_replica(engine, lambda replica: replica.num_running >= 12)
    await push.pause()
    traffic.stop()
    assert (await engine.replica()).state == common_pb2.REPLICA_STATE_UPDATING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await push.break_off()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    replica = await engine.replica()
    assert (replica.state, replica.policy_version) == (common_pb2.REPLICA_STATE_BROKEN, version)
    results = await asyncio.gather(*traffic.calls, return_exceptions=True)
    codes = {result.code() for result in results if isinstance(result, grpc.aio.AioRpcError)}
    assert codes == {grpc.StatusCode.UNAVAILABLE}
    with pytest.raises(grpc.aio.AioRpcError, match="BROKEN") as refused:
        await engine.generation.Generate(request([1, 2, 3]), timeout=60)
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    newer = current.perturbed(7)
    await Push(engine, newer.weights, version + 1).complete()
    replica = await engine.replica()
    assert (replica.state, replica.policy_version) == (common_pb2.REPLICA_STATE_READY, version + 1)
    ids, images = [1, START_ID, IMAGE_ID, END_ID], [picture(96, 96)]
    answer = await engine.generation.Generate(request(ids, images), timeout=60)
    expected, _ = newer.logprobs(ids, images, answer.output_ids, temperature=1.0)
    assert (torch.tensor(list(answer.logprobs)) - expected).abs().max() < TOLERANCE


async def test_a_push_aborted_before_it_touched_weights_changes_nothing(
    engine: EngineProcess, current: Reference
) -> None:
    """Running requests go on under the old version."""
    version = (await engine.replica()).policy_version
    push = Push(engine, current.perturbed(8).weights, version + 1)
    await push.prepare()
    made = request([1, 2, 3], max_new_tokens=400)
    traffic = Traffic(lambda _: engine.generation.Generate(made, timeout=60), 16)
    await until_replica(engine, lambda replica: replica.num_running >= 8)
    with pytest.raises(grpc.aio.AioRpcError, match="needs it RECEIVED") as caught:
        await push.commit()
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    await push.pause()
    traffic.stop()
    assert await push.abort("changed its mind") == common_pb2.REPLICA_STATE_READY
    await asyncio.to_thread(push.group.close)
    for answer in await asyncio.gather(*traffic.calls):
        assert [span.policy_version for span in answer.version_spans] == [version]
        expected, _ = current.logprobs([1, 2, 3], [], answer.output_ids, temperature=1.0)
        assert (torch.tensor(list(answer.logprobs)) - expected).abs().max() < TOLERANCE
    with pytest.raises(grpc.aio.AioRpcError, match="prepare it first"):
        await push.receive_only()


async def test_a_push_that_does_not_fit_is_refused_before_anything_happens(
    engine: EngineProcess, reference: Reference
) -> None:
    """Missing, unknown and misshapen parameters, and versions that go back."""
    version = (await engine.replica()).policy_version
    weights = reference.weights
    name = "model.language_model.norm.weight"
    cases = {
        "1 parameters are missing": {key: value for key, value in weights.items() if key != name},
        "1 are unknown": {**weights, "lm_head.weight": weights["model.language_model.embed_tokens.weight"]},
        "the engine holds float32": {**weights, name: weights[name].bfloat16()},
    }
    for message, wrong in cases.items():
        push = Push(engine, wrong, version + 1)
        with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
            await push.prepare_only()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (await engine.replica()).state == common_pb2.REPLICA_STATE_READY


async def test_forbidden_ids_are_never_sampled(engine: EngineProcess, reference: Reference) -> None:
    """A policy whose logits of all forbidden ids tower above the rest still produces none of them."""
    policy = reference.perturbed(seed=9)
    with torch.no_grad():
        policy.model.model.language_model.embed_tokens.weight[policy.forbidden] *= 100
    await Push(engine, policy.weights, (await engine.replica()).policy_version + 1).complete()
    answers = await asyncio.gather(
        *(engine.generation.Generate(request([1, 2, token], max_new_tokens=40), timeout=60) for token in range(24))
    )
    unmasked = policy.model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1]
    assert int(unmasked.argmax()) in policy.forbidden
    for token, answer in enumerate(answers):
        assert not set(answer.output_ids) & set(policy.forbidden)
        expected, _ = policy.logprobs([1, 2, token], [], answer.output_ids, temperature=1.0)
        assert (torch.tensor(list(answer.logprobs)) - expected).abs().max() < TOLERANCE
