"""Mixtures of experts on real SGLang: what it loads, and what a push makes of it, is the trainer's model."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.testing.engine_process import EngineProcess
from tests.support.engine.family import FELT, difference, engine_of, require_same_through_pushes
from tests.support.engine.push import Push
from tests.support.engine.reference import Reference
from tests.support.trainer.families import MIXTURES, heard, write_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("rendezvous")]


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    model = heard(MIXTURES[request.param](), std_of_embedding=0.1)
    return write_model(model, tmp_path_factory.mktemp("mixture") / request.param)


@pytest.fixture(scope="module")
async def mixture_engine(
    mixture: Path, nats_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineProcess]:
    """Its engine."""
    async with engine_of(mixture, nats_url, tmp_path_factory.mktemp("mixture-engine")) as engine:
        yield engine


@pytest.fixture(scope="module")
def policy(mixture: Path) -> Reference:
    """The same in transformers."""
    return Reference(mixture)


async def test_a_mixture_is_the_trainers_model_before_and_after_pushes(
    mixture_engine: EngineProcess, policy: Reference
) -> None:
    """Exchanged experts would be noticed."""
    newer = await require_same_through_pushes(mixture_engine, policy)
    exchanged = {
        name: weight.flip(0) if name.endswith("experts.down_proj") else weight for name, weight in newer.weights.items()
    }
    await Push(mixture_engine, exchanged, 3).complete()
    assert await difference(mixture_engine, newer) > FELT
