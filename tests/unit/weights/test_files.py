"""Weight files are complete or absent, whatever happens to their writer."""

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.weights.manifest import Manifest, pack, specs_of
from penstock.weights.named_weights import NamedWeights
from penstock.weights.version_folders import belongs_to
from penstock.weights.weight_files import check_weight_files, write_weight_files
from services.trainer.config import WeightSyncConfig
from services.trainer.weight_sync.snapshot import WeightSnapshot
from services.trainer.weight_sync.transports import disk
from services.trainer.weight_sync.transports.disk import WeightFileStore
from tests.support.waiting import HANG_S, until

TENSORS = {"a": torch.arange(1000, dtype=torch.float32), "b": torch.ones(7, dtype=torch.bfloat16)}
MANIFEST = Manifest.plan(specs_of(TENSORS), max_bucket_bytes=1)
BUCKETS = tuple(pack(bucket, TENSORS) for bucket in MANIFEST.buckets)


class _Endless:
    """A bucket whose bytes never come."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def cpu(self) -> torch.Tensor:
        self._pipe.send("writing")
        time.sleep(600)
        raise AssertionError("nobody has killed this process")


def _write_half(folder: Path, pipe: Connection) -> None:
    write_weight_files(folder, 3, MANIFEST, [BUCKETS[0], _Endless(pipe)])  # type: ignore[list-item]


def test_what_was_written_stays_whatever_lies_beside_it(tmp_path: Path) -> None:
    """Newer versions are of a run that has ended; of its own the newest two stay."""
    for version in (499, 500, 1, 2, 3):
        folder = write_weight_files(tmp_path, version, MANIFEST, BUCKETS)
        check_weight_files(folder, version, MANIFEST)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["v00000002", "v00000003", "v00000499", "v00000500"]


def test_runs_that_share_a_folder_have_their_own_in_it(tmp_path: Path) -> None:
    """The versions of each begin at 1."""
    config = WeightSyncConfig(files_dir=tmp_path / "shared")
    parents = {WeightFileStore.of_run(config, tmp_path / "runs" / name).parent for name in ("a-1", "a-2")}
    assert parents == {tmp_path / "shared" / "a-1", tmp_path / "shared" / "a-2"}


async def test_a_run_notes_in_a_shared_folder_whose_files_these_are(tmp_path: Path) -> None:
    """`penstock runs delete` removes no other run's, and a run that goes on elsewhere takes them over."""
    config = WeightSyncConfig(files_dir=tmp_path / "shared")
    for parent, other in (("a", "b"), ("b", "a")):
        store = WeightFileStore.of_run(config, tmp_path / parent / "exp")
        await store.write(WeightSnapshot.take(1, NamedWeights.of(TENSORS), max_bucket_bytes=1))
        assert store.parent is not None
        assert belongs_to(store.parent, tmp_path / parent / "exp")
        assert not belongs_to(store.parent, tmp_path / other / "exp")


def test_what_a_killed_writer_has_left_is_deleted(tmp_path: Path) -> None:
    """By the next one that writes there, whichever version; what else is in the folder stays."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    writer = context.Process(target=_write_half, args=(tmp_path, its), daemon=True)
    writer.start()
    assert mine.poll(60)
    writer.kill()
    writer.join()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".v00000003-")
    (tmp_path / ".keep").touch()
    check_weight_files(write_weight_files(tmp_path, 4, MANIFEST, BUCKETS), 4, MANIFEST)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".keep", "v00000004"]


async def test_one_at_a_time_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that is still being written in the background is finished before the next is begun."""
    others, begun, may_end = threading.Lock(), threading.Event(), threading.Event()

    def alone(parent: Path, version: int, manifest: Manifest, buckets: Sequence[Any]) -> Path:
        assert others.acquire(blocking=False)
        begun.set()
        assert may_end.wait(HANG_S)
        folder = write_weight_files(parent, version, manifest, buckets)
        others.release()
        return folder

    monkeypatch.setattr(disk, "write_weight_files", alone)
    written = WeightFileStore(tmp_path)
    first, second = (WeightSnapshot.take(version, NamedWeights.of(TENSORS), max_bucket_bytes=1) for version in (1, 2))
    written.write_soon(first)
    await until(begun.is_set)
    writing = asyncio.create_task(written.write(second))
    await asyncio.sleep(0)  # it has begun
    may_end.set()
    await writing
    assert written.folder_of(2) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000001", "v00000002"]
    await written.close()
