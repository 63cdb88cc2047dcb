"""Adapters (LoRA) that ranks train together, over a base of which each holds a shard."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import SetupError
from penstock.weights.adapter_names import is_adapter
from services.trainer.backend.ranks.ranks import ALONE, Ranks
from tests.support.trainer.checkpoints import averages_of, tensors_of
from tests.support.trainer.families import FAMILIES, MIXTURES, heard, write_model
from tests.support.trainer.ranks.rank_pool import RankPool
from tests.support.trainer.ranks.ranked_groups import groups_of
from tests.support.trainer.rows import row_of
from tests.unit.backend.ranks.test_pushed_rows import pushed
from tests.unit.backend.ranks.test_ranks import assert_same, backend_of, trained
from tests.unit.backend.ranks.test_sharded_checkpoints import saved

_LORA = {"rank": 3, "alpha": 6.0, "targets": ["text", "tower"]}  # of which two ranks hold two rows and one
_SETTINGS: dict[str, Any] = {"lora": _LORA, "optimizer": {"learning_rate": 1e-2}}
_KL = {"kl": {"kind": "k3", "refresh": "copy", "refresh_every": 2}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": _KL, "micro_batch_tokens": 90},
        {"gradient_checkpointing": True, "optimizer": {"learning_rate": 1e-2, "learning_rates": {"tower": 0.0}}},
    ],
    ids=str,
)
def test_two_ranks_take_the_steps_of_one(two: RankPool, tiny_model_path: Path, settings: dict[str, Any]) -> None:
    """Also of the tower's adapters, which only a row with pictures uses; the reference is the base, then a copy."""
    alone = trained(ALONE, tiny_model_path, {**_SETTINGS, **settings}, range(3))
    assert all(map(is_adapter, alone[0]))
    for together in two.run(trained, tiny_model_path, {**_SETTINGS, **settings}, range(3)):
        assert_same(alone, together, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [{"hsdp_replicas": 2}, pytest.param({"sequence_parallel": 2}, marks=pytest.mark.variant)],
    ids=str,
)
def test_four_ranks_take_the_steps_of_one(four: RankPool, tiny_model_path: Path, parallel: dict[str, int]) -> None:
    """In two replicas, and in two groups that share their rows."""
    alone = trained(ALONE, tiny_model_path, _SETTINGS, range(2))
    for together in four.run(trained, tiny_model_path, {**_SETTINGS, **parallel}, range(2)):
        assert_same(alone, together, atol=2e-5)


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("qwen3_vl_moe", marks=pytest.mark.variant)])
def test_ranks_that_divide_experts_take_the_steps_of_one(two: RankPool, tmp_path: Path, kind: str) -> None:
    """The experts stay as they are, and what goes through them has a gradient."""
    path = write_model(heard(MIXTURES[kind](), std_of_embedding=0.3), tmp_path / "model")
    settings = {**_SETTINGS, "lora": {"rank": 3, "alpha": 6.0}}
    alone = trained(ALONE, path, settings, range(2))
    assert all(".self_attn." in name for name in alone[0])
    for together in two.run(trained, path, {**settings, "expert_parallel": 2}, range(2)):
        assert_same(alone, together, atol=2e-5)


def logprobs(ranks: Ranks, path: Path, checkpoint: Path) -> torch.Tensor:
    """Of a group, in bfloat16, by adapters that were trained."""
    backend = backend_of(ranks, path, checkpoint, dtype="bfloat16", **_SETTINGS)
    with torch.no_grad(), backend._model.precision():
        found: torch.Tensor = backend.policy(row_of(*groups_of(path, seed=0)[0].sequences)).logprobs_N
    return found


@pytest.mark.slow
def test_ranks_compute_with_the_matrix_that_engines_merge(two: RankPool, tiny_model_path: Path, tmp_path: Path) -> None:
    """In bfloat16, too, to the bit: adapters are gathered in float32, and their sum with the base is rounded once."""
    saved_adapters(ALONE, tiny_model_path, None, tmp_path / "saved", [0, 1])
    alone = logprobs(ALONE, tiny_model_path, tmp_path / "saved")
    for together in two.run(logprobs, tiny_model_path, tmp_path / "saved"):
        assert torch.equal(together, alone)


def saved_adapters(
    ranks: Ranks, path: Path, checkpoint: Path | None, folder: Path, seeds: list[int]
) -> tuple[str, list[str]]:
    """The digest of base and adapters after some steps from a checkpoint, of which all write another; and the files."""
    return saved(ranks, path, checkpoint, folder, seeds, algorithm=_KL, **_SETTINGS)


@pytest.mark.slow
def test_a_checkpoint_is_of_no_number_of_ranks(two: RankPool, tiny_model_path: Path, tmp_path: Path) -> None:
    """What one has saved, two write again to the bit, in the one file that PEFT reads; and the other way round."""
    digest, files = saved_adapters(ALONE, tiny_model_path, None, tmp_path / "by one", [0, 1])
    answers = two.run(saved_adapters, tiny_model_path, tmp_path / "by one", tmp_path / "by two", [])
    assert [each for each, _ in answers] == [digest] * 2
    assert [file for _, of_rank in answers for file in of_rank] == files
    assert saved_adapters(ALONE, tiny_model_path, tmp_path / "by two", tmp_path / "again", [])[0] == digest
    for folder in ("adapter", "optimizer", "reference"):
        first = tensors_of(tmp_path / "by one" / folder)
        for other in ("by two", "again"):
            found = tensors_of(tmp_path / other / folder)
            assert found.keys() == first.keys()
            assert all(torch.equal(found[name], first[name]) for name in first), (folder, other)
    configs = [(tmp_path / each / "adapter/adapter_config.json").read_text() for each in ("by one", "by two")]
    assert configs[0] == configs[1]
    assert all(map(is_adapter, averages_of(tmp_path / "by two")))


def of_the_push(ranks: Ranks, path: Path) -> dict[str, int]:
    """Digests of the base that an engine must hold."""
    return dict(backend_of(ranks, path, **_SETTINGS).export().base_digests)


@pytest.mark.slow
@pytest.mark.parametrize("num_near", [2, 1])
def test_a_push_carries_the_adapters_of_all_ranks(two: RankPool, tiny_model_path: Path, num_near: int) -> None:
    """Every byte, in its place, also if a rank cannot open the memory; and the digests of the whole base."""
    (written, gathered), (nothing, _) = two.run(pushed, tiny_model_path, _SETTINGS, num_near)
    assert not nothing
    assert all(map(is_adapter, written))
    assert written == gathered
    base = of_the_push(ALONE, tiny_model_path)
    assert two.run(of_the_push, tiny_model_path) == [base, base]


def refusal(ranks: Ranks, path: Path, checkpoint: Path) -> str:
    """Why a checkpoint is not continued."""
    with pytest.raises(SetupError) as refused:
        backend_of(ranks, path, checkpoint, algorithm=_KL, **_SETTINGS)
    return str(refused.value)


def test_adapters_of_another_base_are_refused(two: RankPool, tiny_model_path: Path, tmp_path: Path) -> None:
    """By every rank, though each has read a part of the base."""
    saved_adapters(ALONE, tiny_model_path, None, tmp_path / "saved", [])
    other = write_model(FAMILIES["qwen3_vl"](), tmp_path / "other")
    for reason in two.run(refusal, other, tmp_path / "saved"):
        assert "holds another model than the one whose adapters" in reason
