"""Ranks compute in bfloat16, sum gradients in float32, and keep float32 weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.backend.ranks.ranks import ALONE, Ranks
from tests.support.trainer.families import MIXTURES, heard, write_model
from tests.support.trainer.ranks.rank_pool import RankPool
from tests.unit.backend.ranks.test_ranks import backend_of, steps_of
from tests.unit.backend.ranks.test_sequence_parallel import gradients_of, require_same_gradients

ROWS: dict[str, Any] = {"dtype": "bfloat16", "micro_batch_tokens": 1}
"""Rows are as short as they can be, and so one rank and several compute the same ones: the same bfloat16 gradients,
which each adds up."""
LEARNING_RATE = 1e-5
"""Steps that change hardly any weight in bfloat16."""


def require_float32_sums(pool: RankPool, path: Path, settings: dict[str, Any]) -> None:
    """Ranks have the sum that one has, and sums rounded to bfloat16 would be noticed."""
    alone = gradients_of(ALONE, path, dict(ROWS))
    require_same_gradients(alone, pool.run(gradients_of, path, ROWS | settings))
    rounded = {name: average.bfloat16().float() for name, average in alone[0].items()}
    with pytest.raises(AssertionError):
        require_same_gradients(alone, [(rounded, *alone[1:])])


def test_gradients_of_two_ranks_are_summed_in_float32(two: RankPool, tiny_model_path: Path) -> None:
    """Over ranks and over the rows of each."""
    require_float32_sums(two, tiny_model_path, {})


@pytest.mark.slow
def test_gradients_of_replicas_are_summed_in_float32(four: RankPool, tiny_model_path: Path) -> None:
    """Over those that hold other shards, and then over those that hold the same one."""
    require_float32_sums(four, tiny_model_path, {"hsdp_replicas": 2})


@pytest.mark.slow
def test_gradients_of_sharded_experts_are_summed_in_float32(two: RankPool, tmp_path: Path) -> None:
    """And those of their router."""
    path = write_model(heard(MIXTURES["qwen3_moe"](), std_of_embedding=0.3), tmp_path / "mixture")
    require_float32_sums(two, path, {})


def masters_of(ranks: Ranks, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights before a small step and after it, as AdamW has them."""
    backend = backend_of(ranks, path, **ROWS, optimizer={"learning_rate": LEARNING_RATE})
    before = {name: weight.clone() for name, weight in backend._model.weights.named()}
    steps_of(backend, path, [0])
    return before, {name: weight.clone() for name, weight in backend._model.weights.named()}


def test_a_step_too_small_for_bfloat16_is_kept(two: RankPool, tiny_model_path: Path) -> None:
    """Weights move as on one rank, to a twentieth of the learning rate; few of them would in bfloat16."""
    before, alone = masters_of(ALONE, tiny_model_path)
    is_lost = torch.cat([(alone[name].bfloat16() == weight.bfloat16()).flatten() for name, weight in before.items()])
    assert is_lost.float().mean() > 0.9
    largest = max(float((after - before[name]).abs().max()) for name, after in alone.items())
    assert LEARNING_RATE / 2 < largest < 2 * LEARNING_RATE
    for _, together in two.run(masters_of, tiny_model_path):
        for name, after in alone.items():
            torch.testing.assert_close(
                together[name], after, rtol=0, atol=LEARNING_RATE / 20, msg=lambda text, name=name: name + text
            )
