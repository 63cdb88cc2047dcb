"""Each rank reads its own rows of a model's files, whichever names and layouts they have there."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.backend.files.tensor_files import StoredTensors
from services.trainer.backend.ranks.ranks import ALONE, Ranks
from tests.support.trainer.families import FAMILIES, MIXTURES, heard, write_model
from tests.support.trainer.ranks.rank_pool import RankPool
from tests.unit.backend.ranks.test_ranks import backend_of


def loaded(ranks: Ranks, path: Path, settings: dict[str, Any]) -> tuple[str, int]:
    """The digest of all weights as this rank knows them, and how many numbers it has read from the files."""
    num_read, read = 0, StoredTensors.rows

    def rows(stored: StoredTensors, name: str, which: slice) -> torch.Tensor:
        nonlocal num_read
        part = read(stored, name, which)
        num_read += part.numel()
        return part

    StoredTensors.rows = rows  # type: ignore[method-assign]
    try:
        backend = backend_of(ranks, path, **settings)
    finally:
        StoredTensors.rows = read  # type: ignore[method-assign]
    return backend.digests().weights, num_read


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family, marks=() if family in (*MIXTURES, "qwen3_vl", "qwen2_5_vl", "qwen2_vl") else pytest.mark.variant
        )
        for family in FAMILIES
    ],
)
def test_two_ranks_read_a_model_once(two: RankPool, tmp_path: Path, family: str) -> None:
    """Together, half of it each; what they then hold is the model."""
    model = heard(FAMILIES[family](), std_of_embedding=0.3)
    total = sum(parameter.numel() for parameter in model.parameters())
    path = write_model(model, tmp_path / family)
    expected = backend_of(ALONE, path).digests().weights
    for settings in ({}, {"expert_parallel": 2}) if family in MIXTURES else ({}, {"optimizer": {"offload": True}}):
        answers = two.run(loaded, path, settings)
        assert {digest for digest, _ in answers} == {expected}
        assert sum(num_read for _, num_read in answers) == total
        assert max(num_read for _, num_read in answers) < 0.6 * total
