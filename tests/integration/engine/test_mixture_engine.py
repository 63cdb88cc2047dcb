"""Mixtures of experts on real SGLang: what it loads, and what a push makes of it, is the trainer's model."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from penstock.testing.engine_process import EngineProcess, engine_process
from tests.support.engine.push import Push
from tests.support.engine.reference import Reference, picture, prompt, request
from tests.support.trainer.mixtures import MIXTURES, heard, write_mixture

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("rendezvous")]


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    model = heard(MIXTURES[request.param](), std_of_embedding=0.3)
    return write_mixture(model, tmp_path_factory.mktemp("mixture") / request.param)


@pytest.fixture(scope="module")
async def mixture_engine(
    mixture: Path, nats_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineProcess]:
    """An engine for all tests of one kind."""
    folder = tmp_path_factory.mktemp("mixture-engine")
    async with engine_process(mixture, nats_url, folder, max_running=8, context_length=512, grace_s=2.0) as engine:
        await engine.replica()  # the connection lasts as long as the engine
        yield engine


@pytest.fixture(scope="module")
def policy(mixture: Path) -> Reference:
    """The same in transformers."""
    return Reference(mixture)


async def difference(engine: EngineProcess, policy: Reference) -> float:
    """The largest |dlogp| between the engine and transformers, over texts and, where the model has eyes, pictures."""
    found = []
    for seed in range(4):
        images = [picture(96, 96, seed=seed)] * (seed % 2 if hasattr(policy.model.config, "vision_config") else 0)
        ids = prompt(random.Random(seed), num_images=len(images), image_id=policy.image_id)
        answer = await engine.generation.Generate(request(ids, images, max_new_tokens=30), timeout=120)
        expected, _ = policy.logprobs(ids, images, answer.output_ids, temperature=1.0)
        found.append(float((torch.tensor(list(answer.logprobs)) - expected).abs().max()))
    return max(found)


async def test_a_mixture_is_the_trainers_model_before_and_after_pushes(
    mixture_engine: EngineProcess, policy: Reference
) -> None:
    """The first goes through SGLang's loader, the second into its parameters; exchanged experts would be noticed."""
    assert await difference(mixture_engine, policy) <= 1e-5
    for version in (1, 2):
        newer = policy.perturbed(seed=version)
        await Push(mixture_engine, newer.weights, version).complete()
        assert await difference(mixture_engine, newer) <= 1e-5
        assert await difference(mixture_engine, policy) > 1e-2
    exchanged = {
        name: weight.flip(0) if name.endswith("experts.down_proj") else weight for name, weight in newer.weights.items()
    }
    await Push(mixture_engine, exchanged, 3).complete()
    assert await difference(mixture_engine, newer) > 1e-2
