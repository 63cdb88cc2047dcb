"""A family whose layers attend linearly on real SGLang: what it loads, what pushes make of it, and what it goes on from
in its caches, is the trainer's model."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import torch

from penstock.v1 import generate_pb2, rollout_pb2
from services.rollout.testing.engine_process import EngineProcess
from tests.support.engine.family import FELT, MOST, PICTURES, difference, engine_of, require_same_through_pushes
from tests.support.engine.push import Push
from tests.support.engine.reference import Reference, picture, prompt, request
from tests.support.engine.traffic import Traffic
from tests.support.trainer.families import heard_in_engines, write_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("rendezvous"),
]

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with vision."""
    return write_model(heard_in_engines("qwen3_5"), tmp_path_factory.mktemp("linear") / "qwen3_5")


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.variant)], ids="{} processes".format)
async def linear_engine(
    model: Path, nats_url: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[EngineProcess]:
    """Its engine, which computes prompts in chunks."""
    folder = tmp_path_factory.mktemp("linear-engine")
    settings = {"sglang": {"chunked_prefill_size": 64}, "tensor_parallel": request.param}
    async with engine_of(model, nats_url, folder, **settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def loaded(model: Path) -> Reference:
    """The same in transformers."""
    return Reference(model)


@pytest.fixture
async def policy(linear_engine: EngineProcess, loaded: Reference) -> Reference:
    """What the engine holds now, whatever other tests have pushed."""
    if version := (await linear_engine.replica()).policy_version:
        await Push(linear_engine, loaded.weights, version + 1).complete()
    return loaded


def exchange(one: str, other: str) -> Callable[[Weights], None]:
    """Give two weights of a layer each other's values."""

    def do(weights: Weights) -> None:
        first, second = (next(name for name in weights if name.endswith(f"layers.1.{each}")) for each in (one, other))
        weights[first], weights[second] = weights[second], weights[first]

    return do


def change(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], None]:
    """Change a weight of a layer."""

    def do(weights: Weights) -> None:
        [full] = [each for each in weights if each.endswith(f"layers.1.linear_attn.{name}")]
        weights[full] = how(weights[full])

    return do


FAULTS = {
    "exchanged gates": exchange("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
    "queries for keys": change(
        "in_proj_qkv.weight", lambda weight: torch.cat([weight[32:64], weight[:32], weight[64:]])
    ),
    "a convolution in other sections": change("conv1d.weight", lambda weight: weight.roll(32, dims=0)),
    "other decays": change("A_log", lambda weight: weight + 1),
    "other heads' decays": change("A_log", lambda weight: weight.flip(0)),
    "other biases of decays": change("dt_bias", lambda weight: weight - 1),
    "norms for those that add one": change("norm.weight", lambda weight: weight + 1),
}


async def test_it_is_the_trainers_model_before_and_after_pushes(
    linear_engine: EngineProcess, policy: Reference
) -> None:
    """Texts and pictures; each fault in one layer would be noticed."""
    version = (await linear_engine.replica()).policy_version
    newer = await require_same_through_pushes(linear_engine, policy, version=version)
    for number, (what, fault) in enumerate(FAULTS.items()):
        weights = newer.weights
        fault(weights)
        await Push(linear_engine, weights, version + 3 + number).complete()
        assert await difference(linear_engine, newer) > FELT, what


async def played(engine: EngineProcess, prompts: Sequence[list[int]]) -> list[generate_pb2.GenerateResponse]:
    """Answers of prompts that run at once."""
    asked = [request(ids, max_new_tokens=20) for ids in prompts]
    return list(await asyncio.gather(*(engine.generation.Generate(each, timeout=120) for each in asked)))


def dlogp(policy: Reference, ids: Sequence[int], answer: generate_pb2.GenerateResponse) -> torch.Tensor:
    """Of each token."""
    expected, _ = policy.logprobs(ids, [], answer.output_ids, temperature=1.0)
    return (torch.tensor(list(answer.logprobs)) - expected).abs()


async def test_requests_go_on_from_states_of_their_own_prefix_and_version(
    linear_engine: EngineProcess, policy: Reference
) -> None:
    """Of many that run at once, some of which begin like others; none goes on from what older weights have left."""
    rng = random.Random(4)
    text = [rng.randrange(300) for _ in range(200)]
    prompts = [text[:length] for length in (3, 20, 64, 65, 90, 200)] + [[rng.randrange(300) for _ in range(90)]]
    for _ in range(2):
        answers = await played(linear_engine, prompts)
        for ids, answer in zip(prompts, answers, strict=True):
            assert dlogp(policy, ids, answer).max() <= MOST
    assert sum(answer.usage.num_cached_tokens > 0 for answer in answers) >= 4
    conversation = [*prompts[-1], *answers[-1].output_ids, *text[:7]]
    [second] = await played(linear_engine, [conversation])
    assert second.usage.num_cached_tokens >= len(prompts[-1])
    assert dlogp(policy, conversation, second).max() <= MOST
    newer = policy.perturbed(seed=5)
    await Push(linear_engine, newer.weights, (await linear_engine.replica()).policy_version + 1).complete()
    for ids, answer in zip(
        [*prompts, conversation], await played(linear_engine, [*prompts, conversation]), strict=True
    ):
        assert dlogp(newer, ids, answer).max() <= MOST
        assert dlogp(policy, ids, answer).max() > FELT


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_turn_that_spans_a_push_goes_on_as_its_mode_says(
    linear_engine: EngineProcess, policy: Reference, mode: str
) -> None:
    """Retracted, all its tokens are computed again; in place, states of the old weights are kept, as keys and values
    are."""
    version = (await linear_engine.replica()).policy_version
    newer = policy.perturbed(seed=6)
    pause = rollout_pb2.PAUSE_MODE_IN_PLACE if mode == "in_place" else rollout_pb2.PAUSE_MODE_RETRACT
    push = Push(linear_engine, newer.weights, version + 1, mode=pause)
    await push.prepare()
    image = picture(*PICTURES[0], seed=1)
    ids = prompt(random.Random(2), num_images=1, image_id=policy.image_id)

    async def play(number: int) -> generate_pb2.GenerateResponse:
        asked = request(ids, [image], max_new_tokens=60 * (1 + number % 4))
        asked.sampling.ignore_end = True
        return await linear_engine.generation.Generate(asked, timeout=120)

    traffic = Traffic(play, 6)
    await traffic.under_way()
    await push.pause()
    traffic.stop()
    await push.deliver()
    seen = 0
    for answer in await asyncio.gather(*traffic.calls):
        if [span.policy_version for span in answer.version_spans] != [version, version + 1]:
            continue
        num_old = answer.version_spans[0].num_tokens
        if mode == "in_place":
            expected = policy.logprobs_over_change(newer, ids, [image], answer.output_ids, num_old)
        else:
            old, new = (each.logprobs(ids, [image], answer.output_ids, temperature=1.0)[0] for each in (policy, newer))
            expected = torch.cat([old[:num_old], new[num_old:]])
        assert (torch.tensor(list(answer.logprobs)) - expected).abs().max() <= MOST
        seen += 1
    assert seen >= 2
