"""What one rank alone cannot read ends the load on all of them, with its number and reason."""

import shutil
from pathlib import Path

import pytest

from services.trainer.backend.ranks.ranks import Ranks
from tests.support.trainer.ranks.rank_pool import RankPool
from tests.support.trainer.teacher import write_teacher
from tests.unit.backend.ranks.test_ranks import backend_of
from tests.unit.backend.ranks.test_sharded_checkpoints import saved


def loaded(ranks: Ranks, paths: list[Path], checkpoints: list[Path | None], teachers: list[Path | None]) -> str:
    """The error of a load on this rank, whose machine has folders of its own; empty: it has loaded them."""
    path, checkpoint, teacher = (each[ranks.rank] for each in (paths, checkpoints, teachers))
    settings = {} if teacher is None else {"algorithm": {"kl": {"kind": "k2", "coef": 1.0, "reference": teacher}}}
    try:
        backend_of(ranks, path, checkpoint, **settings)
    except Exception as error:  # noqa: BLE001 - the test reads it
        return f"{type(error).__name__}: {error}"
    return ""


def damaged(folder: Path, copy: Path, file: str) -> Path:
    """A copy of a folder, one file of which ends early."""
    shutil.copytree(folder, copy)
    (found,) = copy.glob(file)
    found.write_bytes(found.read_bytes()[:-100])
    return copy


def test_a_model_that_one_machine_has_incomplete(two: RankPool, tiny_model_path: Path, tmp_path: Path) -> None:
    """Both ranks fail and name what is wrong where; with a complete copy both load it."""
    broken = damaged(tiny_model_path, tmp_path / "copy", "*.safetensors")
    first, second = two.run(loaded, [tiny_model_path, broken], [None, None], [None, None])
    assert second.startswith("ConfigError: model.path: ")
    assert first == f"ConfigError: rank 1 cannot go on: {second.removeprefix('ConfigError: ')}"
    first, second = two.run(loaded, [broken, tiny_model_path], [None, None], [None, None])
    assert first.startswith("ConfigError: model.path: ")
    assert second.startswith("ConfigError: rank 0 cannot go on: ")
    assert two.run(loaded, [tiny_model_path] * 2, [None, None], [None, None]) == ["", ""]


@pytest.mark.slow
def test_a_checkpoint_that_one_machine_lacks(two: RankPool, tiny_model_path: Path, tmp_path: Path) -> None:
    """All of it, because the folder of runs is not shared, or a part."""
    two.run(saved, tiny_model_path, None, tmp_path / "saved", [0])
    nowhere, without_state, without_averages = (tmp_path / name for name in ("nowhere", "stateless", "average"))
    shutil.copytree(tmp_path / "saved", without_state)
    (without_state / "trainer.pt").unlink()
    shutil.copytree(tmp_path / "saved", without_averages)
    shutil.rmtree(without_averages / "optimizer")
    for checkpoint, error in (
        (nowhere, f"SetupError: rank 1 cannot go on: {nowhere} is not there: run.dir"),
        (without_state, f"SetupError: rank 1 cannot go on: {without_state} has no trainer.pt"),
        (without_averages, "RuntimeError: rank 1 cannot go on: FileNotFoundError"),
    ):
        first, second = two.run(loaded, [tiny_model_path] * 2, [tmp_path / "saved", checkpoint], [None, None])
        assert first.startswith(error)
        assert second


def test_a_teacher_that_one_machine_lacks(two: RankPool, tiny_model_path: Path, tmp_path: Path) -> None:
    """It is read when all hold their shards of the policy."""
    teacher = write_teacher(tiny_model_path, tmp_path / "teacher")
    first, second = two.run(loaded, [tiny_model_path] * 2, [None, None], [teacher, tmp_path / "nowhere"])
    assert second.startswith("ConfigError: algorithm.kl.reference")
    assert first.startswith("ConfigError: rank 1 cannot go on: algorithm.kl.reference")
