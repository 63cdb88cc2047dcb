"""A checkpoint that another process reads stays until that has ended, however it ends."""

import errno
import fcntl
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import SetupError
from services.trainer.checkpoint.holding import held_model
from services.trainer.checkpoint.store import CheckpointStore

_READER = """
import sys
from pathlib import Path
from services.trainer.checkpoint.holding import held_model

with held_model(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def write(folder: Path) -> None:
    """A model."""
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(b"w")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Keeps one checkpoint, and has that of step 1."""
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, {}, write)
    return store


def test_a_checkpoint_stays_while_it_is_read(store: CheckpointStore) -> None:
    """By two, until the second has ended; the run's newest is another."""
    model = store.folder / "step-000001/model"
    with held_model(model):
        with held_model(model):
            store.save(2, {}, write)
        store.save(3, {}, write)
        assert store.steps() == [1, 3]
        assert (model / "weights").exists()
        latest = store.latest()
        assert latest is not None
        assert latest.step == 3
    store.save(4, {}, write)
    assert store.steps() == [4]


def test_a_reader_of_a_deleted_checkpoint_is_told(store: CheckpointStore) -> None:
    """It was found, and deleted while its digests were compared."""
    model = store.folder / "step-000001/model"
    store.save(2, {}, write)
    assert not model.exists()
    with (
        pytest.raises(SetupError, match=r"step-000001 has just been deleted, .* give the command again"),
        held_model(model),
    ):
        pass


def test_a_killed_reader_keeps_nothing(store: CheckpointStore) -> None:
    """With -9: the next save deletes what it read."""
    command = [sys.executable, "-c", _READER, store.folder / "step-000001/model"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "held\n"
        store.save(2, {}, write)
        assert store.steps() == [1, 2]
        reader.kill()
    store.save(3, {}, write)
    assert store.steps() == [3]
    assert sorted(path.name for path in (store.folder / "step-000003").rglob("*") if path.is_file()) == [
        "manifest.json",
        "state.json",
        "weights",
    ]


def test_a_reader_that_comes_too_late_is_told(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run deletes the checkpoint between the reader's look and its lock."""
    flock = fcntl.flock

    def delete_and_lock(file: Any, operation: int) -> None:
        monkeypatch.undo()
        store.save(2, {}, write)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", delete_and_lock)
    with (
        pytest.raises(SetupError, match=r"step-000001 has just been deleted, .*; give the command again"),
        held_model(store.folder / "step-000001/model"),
    ):
        pass


def test_without_locks_checkpoints_are_deleted_as_ever(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Lustre that is mounted without them; readers read on."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held_model(store.folder / "step-000001/model"):
        store.save(2, {}, write)
    assert store.steps() == [2]


def test_a_model_that_no_run_wrote_is_read_as_ever(tmp_path: Path, store: CheckpointStore) -> None:
    """A copy, for example, also where its folder cannot be written."""
    copy = tmp_path / "copy"
    shutil.copytree(store.folder / "step-000001/model", copy)
    with held_model(copy):
        store.save(2, {}, write)
    assert store.steps() == [2]
