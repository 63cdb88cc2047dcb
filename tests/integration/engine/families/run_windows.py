"""Qwen2.5-VL on real SGLang: a tower with windows, and with MLPs that SGLang pads, is the trainer's before and after
pushes. Not collected by default: `make test-families`."""

from pathlib import Path

import pytest

from tests.support.engine.family import FELT, difference, engine_of, require_same_through_pushes
from tests.support.engine.reference import Reference
from tests.support.trainer.families import heard, random_qwen2_5_vl, write_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.usefixtures("rendezvous")]


@pytest.mark.leaves_behind("transformers' progress bar keeps a thread", "thread")
async def test_a_tower_with_windows_is_the_trainers_before_and_after_pushes(nats_url: str, tmp_path: Path) -> None:
    """A tower that saw the whole picture in every layer would be noticed."""
    model = write_model(heard(random_qwen2_5_vl(), std_of_embedding=0.1), tmp_path / "model")
    async with engine_of(model, nats_url, tmp_path) as engine:
        newer = await require_same_through_pushes(engine, Reference(model))
        newer.model.model.visual.fullatt_block_indexes = [0, 1]
        assert await difference(engine, newer) > FELT
