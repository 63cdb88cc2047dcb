"""Which evaluation a trainer goes on with, and what it removes of others."""

import shutil
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch

from penstock.errors import SetupError
from penstock.weights.digest import XXH3
from penstock.weights.manifest import pack
from penstock.weights.named_weights import NamedWeights
from services.rollout.testing.simulated_replica import weights_of
from services.trainer.evaluation.holding import (
    Interrupted,
    ReplicaHolding,
    find_interrupted,
    folder_of,
    give_up_interrupted,
)
from services.trainer.weight_sync.held_out.kept_weights import KeptWeights
from services.trainer.weight_sync.snapshot import WeightSnapshot
from tests.unit.evaluation.test_evaluator import evaluator


def keep(run_folder: Path, step: int, version: int) -> KeptWeights:
    """What an evaluation of `step` keeps."""
    weights = WeightSnapshot.take(version, NamedWeights.of(weights_of(version)), max_bucket_bytes=8192)
    return KeptWeights.write(folder_of(run_folder, step) / "weights", weights)


def left(run_folder: Path) -> list[str]:
    """The evaluations of which weights are kept."""
    return sorted(folder.parent.name for folder in run_folder.glob("evaluations/*/weights"))


def test_an_evaluation_that_has_not_ended_goes_on(tmp_path: Path) -> None:
    """Its weights are of the surviving history; those of one that has ended, or of lost steps, are removed."""
    keep(tmp_path, 4, 5)
    kept = keep(tmp_path, 8, 9)
    keep(tmp_path, 12, 13)
    assert find_interrupted(tmp_path, 10, done={4}) == Interrupted(step=8, kept=kept)
    assert left(tmp_path) == ["step-000008"]
    assert find_interrupted(tmp_path, 8, done={4}) == Interrupted(step=8, kept=kept)
    assert find_interrupted(tmp_path, 7, done={4}) is None
    assert left(tmp_path) == []


def test_weights_that_were_not_written_to_the_end_are_no_weights(tmp_path: Path) -> None:
    """The trainer was killed while it wrote them; the update had not been made, so the evaluation is due again."""
    folder = folder_of(tmp_path, 4) / "weights" / ".v00000005-0123abcd"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"half")
    assert find_interrupted(tmp_path, 4, done=()) is None
    assert left(tmp_path) == []


def test_kept_weights_are_read_back_as_they_were(tmp_path: Path) -> None:
    """In the same order and buckets, so that a replica that reads the files finds what is announced."""
    weights = WeightSnapshot.take(5, NamedWeights.of(weights_of(5)), max_bucket_bytes=8192)
    kept = KeptWeights.write(tmp_path, weights)
    read = kept.load(device=torch.device("cpu"), kind=XXH3, max_bucket_bytes=8192, pool=None)
    assert (read.version, read.manifest, read.digests) == (5, weights.manifest, weights.digests)
    (kept.folder / "model.safetensors").unlink()
    with pytest.raises(SetupError, match="policy version 5, which an evaluation plays"):
        kept.load(device=torch.device("cpu"), kind=XXH3, max_bucket_bytes=8192, pool=None)


def test_kept_weights_are_moved_bucket_by_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may be using the rest of the GPU, which never has a second copy of all of them."""
    weights = WeightSnapshot.take(5, NamedWeights.of(weights_of(5)), max_bucket_bytes=8192)
    kept = KeptWeights.write(tmp_path, weights)
    moved: list[weakref.ref[torch.Tensor]] = []
    num_left: list[int] = []

    def noted(bucket: Any, tensors: Any, **options: Any) -> torch.Tensor:
        num_left.append(sum(each() is not None for each in moved))
        moved.extend(map(weakref.ref, tensors.values()))
        return pack(bucket, tensors, **options)

    monkeypatch.setattr("services.trainer.weight_sync.snapshot.pack", noted)
    read = kept.load(device=torch.device("meta"), kind=XXH3, max_bucket_bytes=8192, pool=None)
    assert {each.device.type for each in read.buckets} == {"meta"}
    assert num_left == [0] * len(weights.buckets)
    assert len(moved) == len(weights_of(5))


class Record:
    """What routers read, in memory."""

    def __init__(self, version: int) -> None:
        """Replicas are held out at `version`; 0: none are."""
        self.value = SimpleNamespace(policy_version=version, replica_ids=["a"] if version else [])

    async def clear(self) -> None:
        """Hold nothing out."""
        self.value = SimpleNamespace(policy_version=0, replica_ids=[])


@pytest.mark.parametrize("held_out", [5, 0])
async def test_a_run_that_no_longer_evaluates_keeps_no_weights(tmp_path: Path, held_out: int) -> None:
    """A stopped evaluation left them, whether its replicas are still held out or not."""
    keep(tmp_path, 4, 5)
    record: Any = Record(held_out)
    await give_up_interrupted(tmp_path, record)
    assert record.value.policy_version == 0
    assert left(tmp_path) == []


@pytest.fixture
def removing_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that remove folders."""
    threads: list[int] = []
    remove = shutil.rmtree

    def noted(*args: Any, **options: Any) -> None:
        threads.append(threading.get_ident())
        remove(*args, **options)

    monkeypatch.setattr(shutil, "rmtree", noted)
    return threads


async def test_weights_are_removed_outside_the_event_loop(tmp_path: Path, removing_threads: list[int]) -> None:
    """They are gigabytes: as a run goes on, and where no replica can be held out after all."""
    keep(tmp_path, 4, 5)
    removing_threads.clear()
    await evaluator(tmp_path, step=2)
    weights = WeightSnapshot.take(5, NamedWeights.of(weights_of(5)), max_bucket_bytes=8192)

    async def hold_out(_: Any) -> bool:
        return False

    publisher: Any = SimpleNamespace(current=weights, can_hold_out=lambda num, version: True, hold_out=hold_out)
    record: Any = Record(0)
    assert await ReplicaHolding(publisher, record, run_folder=tmp_path, num=1).begin(8, 5) is None
    assert left(tmp_path) == []
    assert len(removing_threads) >= 2
    assert threading.get_ident() not in removing_threads


async def test_a_pause_says_how_many_replicas_serve(tmp_path: Path) -> None:
    """A run may have more that are still starting."""
    weights = WeightSnapshot.take(5, NamedWeights.of(weights_of(5)), max_bucket_bytes=8192)
    publisher: Any = SimpleNamespace(current=weights, can_hold_out=lambda num, version: False, num_live_replicas=1)
    record: Any = Record(0)
    with structlog.testing.capture_logs() as logs:
        assert await ReplicaHolding(publisher, record, run_folder=tmp_path, num=1).begin(8, 5) is None
    [event] = logs
    assert (event["event"], event["step"]) == ("evaluation.pauses_training", 8)
    assert event["reason"].startswith("no replica can be spared: 1 have loaded by now, and training needs one")
