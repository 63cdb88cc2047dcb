"""Rounds in which one rank's row has pictures and another's has none: ranks do not wait for each other for ever, and
take the steps of one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.backend.base import take_step
from services.trainer.backend.ranks.ranks import ALONE, Ranks
from tests.support.trainer.families import heard, random_qwen3_vl_moe, write_model
from tests.support.trainer.ranks.rank_pool import RankPool
from tests.support.trainer.ranks.ranked_groups import VERSION, groups_of
from tests.unit.backend.ranks.test_ranks import assert_same, backend_of, weights_of

TRAINED: dict[str, dict[str, Any]] = {
    "everything": {},
    "frozen tower": {"learning_rates": {"tower": 0.0}},
    "frozen text": {"learning_rates": {"text": 0.0}},
}


def trained_at_once(
    ranks: Ranks, path: Path, settings: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], list[bool]]:
    """Weights and metrics of two steps on all groups in one chunk, and whether each row of this rank had pictures."""
    backend = backend_of(ranks, path, **settings)
    compute, have_pictures = backend._parts.passes.model, list[bool]()

    def noted(row: Any) -> Any:
        have_pictures.append(row.pixel_values_PD is not None)
        return compute(row)

    object.__setattr__(backend._parts.passes, "model", noted)
    metrics = [take_step(backend, [groups_of(path, seed=seed)], VERSION + seed) for seed in range(2)]
    return weights_of(backend), metrics, have_pictures


def require_the_steps_of_one(two: RankPool, path: Path, settings: dict[str, Any], **together: Any) -> None:
    """On two ranks, of which one at a time had pictures."""
    alone = trained_at_once(ALONE, path, dict(settings))
    answers = two.run(trained_at_once, path, settings | together)
    rounds = set(zip(*(have_pictures for *_, have_pictures in answers), strict=True))
    assert rounds & {(True, False), (False, True)}, rounds
    for weights, metrics, _ in answers:
        assert_same(alone[:2], (weights, metrics))


@pytest.mark.parametrize(
    "trained", [*(pytest.param(name, marks=pytest.mark.slow) for name in list(TRAINED)[:2]), "frozen text"]
)
def test_a_row_without_pictures_beside_one_with_some(two: RankPool, tiny_model_path: Path, trained: str) -> None:
    """Whatever is trained; frozen text is what only rows with pictures would go back through."""
    require_the_steps_of_one(two, tiny_model_path, {"optimizer": TRAINED[trained]})


@pytest.mark.slow
@pytest.mark.parametrize("trained", TRAINED)
def test_a_row_without_pictures_beside_one_with_some_in_a_mixture(two: RankPool, tmp_path: Path, trained: str) -> None:
    """Whose ranks exchange tokens in every layer, forward and back."""
    path = write_model(heard(random_qwen3_vl_moe(), std_of_embedding=0.3), tmp_path / "mixture")
    require_the_steps_of_one(two, path, {"optimizer": TRAINED[trained]}, expert_parallel=2)
