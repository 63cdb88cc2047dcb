"""Checkpoints: whole or not there, whatever dies while they are written."""

from pathlib import Path

import pytest

from penstock.errors import SetupError
from services.trainer.checkpoint.store import CheckpointStore


def write(folder: Path) -> None:
    """Two files, one in a folder."""
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(b"w" * 1000)
    (folder / "optimizer.pt").write_bytes(b"o" * 10)


def test_gives_back_what_was_saved_last(tmp_path: Path) -> None:
    """Step, state and files; none where there never was one."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert store.latest() is None
    store.save(3, {"gate": {"next_index": 7}}, write)
    store.save(6, {"gate": {"next_index": 9}}, write)
    checkpoint = CheckpointStore(tmp_path / "checkpoints", keep=2).latest()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.state) == (6, {"gate": {"next_index": 9}})
    assert (checkpoint.model_path / "weights").read_bytes() == b"w" * 1000


def test_keeps_the_newest(tmp_path: Path) -> None:
    """And no more."""
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 10, 11):
        store.save(step, {}, write)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000010", "step-000011"]


def test_a_trainer_killed_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """What it left is no checkpoint, and is cleared away by the next."""
    store = CheckpointStore(tmp_path, keep=3)
    store.save(1, {}, write)

    def die(folder: Path) -> None:
        write(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(2, {}, die)
    assert (tmp_path / ".step-000002.partial").is_dir()
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1
    store.save(2, {}, write)
    assert not list(tmp_path.glob(".*"))
    latest = store.latest()
    assert latest is not None
    assert latest.step == 2


def test_a_trainer_killed_before_the_pointer_was_moved_has_both(tmp_path: Path) -> None:
    """The pointer names the older one, which is whole: that is the one that counts."""
    store = CheckpointStore(tmp_path, keep=3)
    store.save(1, {}, write)
    store.save(2, {}, write)
    (tmp_path / "latest").write_text("step-000001\n")
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "half a manifest"])
def test_a_damaged_checkpoint_is_refused_for_the_one_before(tmp_path: Path, damage: str) -> None:
    """With a warning, whatever is damaged."""
    store = CheckpointStore(tmp_path, keep=3)
    store.save(1, {"step": 1}, write)
    path = store.save(2, {"step": 2}, write).path
    match damage:
        case "truncated":
            (path / "model" / "weights").write_bytes(b"w" * 999)
        case "missing":
            (path / "optimizer.pt").unlink()
        case "no manifest":
            (path / "manifest.json").unlink()
        case "half a manifest":
            (path / "manifest.json").write_text('{"step": 2,')
    latest = store.latest()
    assert latest is not None
    assert latest.state == {"step": 1}


def test_says_so_when_no_checkpoint_is_whole(tmp_path: Path) -> None:
    """Starting anew in silence would lose a run."""
    store = CheckpointStore(tmp_path, keep=3)
    path = store.save(1, {}, write).path
    (path / "model" / "weights").write_bytes(b"w" * 999)
    with pytest.raises(SetupError, match="step-000001: model/weights has 999 bytes instead of 1000"):
        store.latest()


def test_the_same_step_can_be_written_again(tmp_path: Path) -> None:
    """A run that was resumed reaches the same steps."""
    store = CheckpointStore(tmp_path, keep=3)
    store.save(1, {"life": 1}, write)
    store.save(1, {"life": 2}, write)
    latest = store.latest()
    assert latest is not None
    assert latest.state == {"life": 2}


def test_later_steps_of_a_history_that_was_given_up_do_not_come_back(tmp_path: Path) -> None:
    """Step 10 was never pointed at, or is damaged; the run went on from 5, and 7 is its newest."""
    store = CheckpointStore(tmp_path, keep=1)
    store.save(10, {"life": 1}, write)
    store.save(7, {"life": 2}, write)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000007"]
    latest = store.latest()
    assert latest is not None
    assert latest.state == {"life": 2}
