"""A full disk ends the trainer with one line, and costs nothing that was saved before."""

import asyncio
import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.errors import DataError, SetupError
from penstock.runtime.disk_space import disk_full_reported
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.files.tensor_files import save_state, save_tensors
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import TrainerConfig
from services.trainer.starting_point import find_starting_point
from services.trainer.telemetry.metrics_log import MetricsLog

LARGEST_FILE_BYTES = 100_000


@pytest.fixture
def small_files() -> Iterator[None]:
    """Until the test ends, no file may become larger: writing then fails as it does where a quota is used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write(folder: Path) -> None:
    """A checkpoint of a MiB, but for what the store adds."""
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(bytes(2**20))


def write_on_a_full_disk(folder: Path) -> None:
    """The same, and then the device has no room left."""
    write(folder)
    (folder / "state.json").symlink_to("/dev/full")


def test_a_checkpoint_without_room_leaves_nothing(tmp_path: Path) -> None:
    """The error names folder, room and remedy; the checkpoint before stays, and the next one can be written."""
    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(SetupError) as first:
        store.save(1, {}, write_on_a_full_disk)
    assert str(first.value).startswith(
        f"no room for the checkpoint of step 1 in {tmp_path}: No space left on device; it had "
    )
    assert str(first.value).endswith(
        " MiB; make room there and start the run again, which continues from the beginning"
    )
    for step in (2, 3):
        store.save(step, {}, write)
    with pytest.raises(SetupError) as later:
        store.save(4, {}, write_on_a_full_disk)
    assert str(later.value).endswith(
        " MiB, and step-000003 takes 1 MiB; make room there, for example by deleting step-000002, and start the run "
        "again, which continues from step-000003"
    )
    assert not list(tmp_path.glob(".*.partial"))
    latest = CheckpointStore(tmp_path, keep=2).latest()
    assert latest is not None
    assert latest.step == 3
    assert store.save(4, {}, write).step == 4


def test_a_quota_that_is_used_up_is_told_as_such(tmp_path: Path) -> None:
    """The free space of the disk would only mislead."""

    def exceed_quota(_: Path) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, {}, write)
    with pytest.raises(SetupError) as raised:
        store.save(2, {}, exceed_quota)
    assert str(raised.value) == (
        f"no room for the checkpoint of step 2 in {tmp_path}: Disk quota exceeded; step-000001 takes 1 MiB; make room "
        "there and start the run again, which continues from step-000001"
    )


def test_any_other_failed_write_leaves_nothing_either(tmp_path: Path) -> None:
    """It keeps its own error."""

    def fail(folder: Path) -> None:
        write(folder)
        raise PermissionError(errno.EACCES, "Permission denied", "model.safetensors")

    with pytest.raises(PermissionError, match=r"Permission denied: 'model\.safetensors'"):
        CheckpointStore(tmp_path, keep=1).save(1, {}, fail)
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.usefixtures("small_files")
def test_a_policy_without_room_is_told_as_such(tmp_path: Path, tiny_model_path: Path) -> None:
    """Whatever library writes its files."""
    config = TrainerConfig.model_validate({"device": "cpu"})
    backend = InProcessBackend(tiny_model_path, config, AlgorithmConfig(), seed=0, temperature=1.0)
    backend.load(None)
    folder = tmp_path / "checkpoints"
    with pytest.raises(SetupError, match=rf"no room for the checkpoint of step 1 in {folder}: File too large; make"):
        CheckpointStore(folder, keep=1).save(1, {}, backend.save)
    assert not list((tmp_path / "checkpoints").glob(".*.partial"))


def write_safetensors(path: Path) -> None:
    """A safetensors file that is too large."""
    save_tensors({"weight": torch.zeros(LARGEST_FILE_BYTES)}, path, metadata=None)


def write_state(path: Path) -> None:
    """A file of torch that is too large."""
    save_state({"weight": torch.zeros(LARGEST_FILE_BYTES)}, path)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("write_tensors", [write_safetensors, write_state])
def test_a_failed_write_of_tensors_is_an_os_error(tmp_path: Path, write_tensors: Callable[[Path], None]) -> None:
    """With its number, by which a full disk is told from others."""
    with pytest.raises(OSError, match="File too large") as raised:
        write_tensors(tmp_path / "tensors")
    assert raised.value.errno == errno.EFBIG


def test_a_state_is_read_back(tmp_path: Path) -> None:
    """As `torch.load` reads it."""
    save_state({"weight": torch.arange(3), "settings": {"a": 1}}, tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert found["weight"].tolist() == [0, 1, 2]
    assert found["settings"] == {"a": 1}


@pytest.mark.usefixtures("small_files")
async def test_metrics_without_room_end_the_run_in_one_line(tmp_path: Path) -> None:
    """Also from a task beside the loop."""
    log = MetricsLog(tmp_path, last_step=0)

    async def train() -> None:
        log.write({"step": 1, "note": "x" * LARGEST_FILE_BYTES})

    async def run() -> None:
        with disk_full_reported(tmp_path, "make room"):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(train())

    with pytest.raises(SetupError, match=rf"{tmp_path}: .*File too large; [\d,]+ MiB are free there; make room"):
        await run()


async def test_what_a_full_disk_did_not_cause_is_raised(tmp_path: Path) -> None:
    """Alone, and among errors that it did cause."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(FileNotFoundError), disk_full_reported(tmp_path, "make room"):
        raise FileNotFoundError(errno.ENOENT, "gone")
    with pytest.raises(ExceptionGroup) as raised, disk_full_reported(tmp_path, "make room"):
        raise ExceptionGroup("tasks", [full, DataError("a row is wrong")])
    assert [str(error) for error in raised.value.exceptions] == ["a row is wrong"]
    with pytest.raises(SetupError, match="No space left on device"), disk_full_reported(tmp_path, "make room"):
        raise ExceptionGroup("tasks", [ExceptionGroup("more", [full])])


async def test_a_disk_that_is_full_at_the_start_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is a folder; as a fault that a person mends, not one to start again for."""

    def claim(_: CheckpointStore) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CheckpointStore, "claim", claim)
    run = SimpleNamespace(folder=tmp_path / "runs" / "a", name="a")
    settings: Any = SimpleNamespace(run=run, trainer=SimpleNamespace(keep_checkpoints=1))
    bus: Any = None
    with pytest.raises(SetupError, match=r"runs/a: .*No space left.* MiB are free there; make room and start the run"):
        await find_starting_point(settings, bus)
