"""Ranks in groups that each hold shards of all weights (HSDP) take the steps of one rank."""

from pathlib import Path

import pytest
import torch

from services.trainer.algorithm.presets import PRESETS
from services.trainer.backend.ranks.ranks import ALONE, Ranks
from tests.support.trainer.checkpoints import tensors_of
from tests.support.trainer.families import MIXTURES, heard, write_model
from tests.support.trainer.ranks.rank_pool import RankPool
from tests.unit.algorithm.test_chunks import ALGORITHMS
from tests.unit.backend.ranks.test_ranks import (
    assert_offloading_changes_no_bit,
    assert_same,
    backend_of,
    trained,
    weights_of,
)
from tests.unit.backend.ranks.test_sharded_checkpoints import saved

pytestmark = pytest.mark.slow

_REPLICAS = {"hsdp_replicas": 2}


def test_two_replicas_of_two_shards_take_the_steps_of_one_rank(four: RankPool, tiny_model_path: Path) -> None:
    """Loss, gradient norm and weights, up to the order of sums; also where the norm decides how far a step goes."""
    optimizer = {"learning_rates": {"tower": 0.0}, "grad_clip": 1e-3, "weight_decay": 0.1}
    settings = {"micro_batch_tokens": 90, "optimizer": optimizer}
    alone = trained(ALONE, tiny_model_path, settings, range(2))
    for together in four.run(trained, tiny_model_path, settings | _REPLICAS, range(2)):
        assert_same(alone, together)


def test_offloading_changes_no_bit_of_what_replicas_compute(four: RankPool, tiny_model_path: Path) -> None:
    """Each replica has all weights, gradients and averages in the host's memory."""
    assert_offloading_changes_no_bit(four, tiny_model_path, dict(_REPLICAS), {})


@pytest.mark.parametrize(
    "name",
    [
        "m2po",
        "normalised",
        *(pytest.param(name, marks=pytest.mark.variant) for name in (*PRESETS, "kl in reward") if name != "m2po"),
    ],
)
def test_four_ranks_compare_samples_over_the_batch_as_one(four: RankPool, tiny_model_path: Path, name: str) -> None:
    """Whole samples and statistics of the batch, of which each rank computes a part, are the same for any number."""
    settings = {"micro_batch_tokens": 90, "algorithm": ALGORITHMS[name]}
    alone = trained(ALONE, tiny_model_path, dict(settings), range(1))
    for together in four.run(trained, tiny_model_path, settings, range(1)):
        assert_same(alone, together)


@pytest.mark.variant
def test_ranks_that_hold_all_weights_each_take_the_steps_of_one(four: RankPool, tiny_model_path: Path) -> None:
    """As many replicas as ranks: nothing is sharded, and gradients are summed."""
    alone = trained(ALONE, tiny_model_path, {}, range(2))
    for together in four.run(trained, tiny_model_path, {"hsdp_replicas": 4}, range(2)):
        assert_same(alone, together)


@pytest.mark.variant
def test_replicas_take_the_steps_of_one_with_a_mixture_of_experts(four: RankPool, tmp_path: Path) -> None:
    """Experts are shards as other weights are."""
    path = write_model(heard(MIXTURES["qwen3_moe"](), std_of_embedding=0.3), tmp_path / "model")
    alone = trained(ALONE, path, {"micro_batch_tokens": 90}, range(2))
    for together in four.run(trained, path, {"micro_batch_tokens": 90, **_REPLICAS}, range(2)):
        assert_same(alone, together)


def saved_by_replicas(
    ranks: Ranks, path: Path, num_replicas: int, checkpoint: Path | None, folder: Path, seed: int
) -> tuple[str, int]:
    """The digest of the weights after a step, and how many weight files this rank wrote."""
    digest, files = saved(ranks, path, checkpoint, folder, [seed], hsdp_replicas=num_replicas)
    return digest, sum(file.endswith(".safetensors") for file in files)


def test_replicas_write_each_tensor_once_and_any_ranks_go_on(
    four: RankPool, tiny_model_path: Path, tmp_path: Path
) -> None:
    """All four write a share, replicas are equal to the last bit, and the number of replicas may change."""
    answers = four.run(saved_by_replicas, tiny_model_path, 2, None, tmp_path / "two", 0)
    assert len({digest for digest, _ in answers}) == 1
    assert all(num_files for _, num_files in answers)
    saved(ALONE, tiny_model_path, tmp_path / "two", tmp_path / "two one", [1])
    saved(ALONE, tiny_model_path, None, tmp_path / "one one", [0, 1])
    expected = tensors_of(tmp_path / "one one/model")
    assert_same((expected, []), (tensors_of(tmp_path / "two one/model"), []))
    for replicas in (2, 4):
        way = tmp_path / f"two {replicas}-fold"
        four.run(saved_by_replicas, tiny_model_path, replicas, tmp_path / "two", way, 1)
        assert_same((expected, []), (tensors_of(way / "model"), []))
    straight = weights_of(backend_of(ALONE, tiny_model_path, tmp_path / "one one"))
    assert all(torch.equal(expected[name], weight) for name, weight in straight.items())
