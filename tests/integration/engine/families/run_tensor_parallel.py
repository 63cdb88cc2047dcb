"""An engine whose processes share the layers: what a push makes of it is the trainer's model. Not collected by
default: `make test-families`."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.rollout.testing.engine_process import EngineProcess
from tests.support.engine.family import FELT, difference, engine_of, require_same_through_pushes
from tests.support.engine.push import Push
from tests.support.engine.reference import Reference

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("rendezvous")]


@pytest.fixture(scope="module")
async def shared_engine(
    tiny_model_path: Path, nats_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineProcess]:
    """Two processes."""
    folder = tmp_path_factory.mktemp("shared-engine")
    async with engine_of(tiny_model_path, nats_url, folder, tensor_parallel=2) as engine:
        yield engine


async def test_an_engine_of_two_processes_is_the_trainers_model_before_and_after_pushes(
    shared_engine: EngineProcess, tiny_model_path: Path
) -> None:
    """Parts that are exchanged would be noticed."""
    newer = await require_same_through_pushes(shared_engine, Reference(tiny_model_path))
    exchanged = {
        name: weight.roll(weight.shape[1] // 2, 1) if name.endswith("o_proj.weight") else weight
        for name, weight in newer.weights.items()
    }
    await Push(shared_engine, exchanged, 3).complete()
    assert await difference(shared_engine, newer) > FELT
