"""Checkpoints: whole or not there, whatever dies while they are written."""

import errno
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import SetupError
from penstock.runtime.file_digest import file_digest
from services.trainer.checkpoint import store as store_module
from services.trainer.checkpoint.store import CheckpointStore


def write(folder: Path) -> None:
    """Two files, one in a folder."""
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(b"w" * 1000)
    (folder / "trainer.pt").write_bytes(b"o" * 10)


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


def test_an_old_checkpoint_that_cannot_be_deleted_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS a file that another process has open keeps its folder, and nothing else; a later start tries again."""

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        if path == "model":
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        rmdir(path, dir_fd=dir_fd)

    rmdir = os.rmdir
    monkeypatch.setattr(os, "rmdir", refuse)
    store = CheckpointStore(tmp_path, keep=1)
    for step in (1, 2, 3):
        store.save(step, {}, write)
    store = CheckpointStore(tmp_path, keep=1)
    store.claim()
    latest = store.latest()
    assert latest is not None
    assert latest.step == 3
    assert len([*tmp_path.rglob("*.unwanted")]) == 2
    assert len([*tmp_path.rglob("trainer.pt")]) == 1
    monkeypatch.undo()
    CheckpointStore(tmp_path, keep=1).claim()
    assert [*tmp_path.rglob("*.unwanted")] == []


def test_a_trainer_killed_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """What it left is no checkpoint, and is cleared away by the next."""
    store = CheckpointStore(tmp_path, keep=3)
    store.save(1, {}, write)

    def die(folder: Path) -> None:
        write(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(2, {}, die)
    assert len(list(tmp_path.glob(".step-000002.*.partial"))) == 1
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1
    store = CheckpointStore(tmp_path, keep=3)
    store.save(2, {}, write)
    (writers,) = tmp_path.glob(".*")
    assert writers.name.startswith(".writer-")
    assert not list(writers.iterdir())
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


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "no manifest", "half a manifest"])
def test_a_damaged_checkpoint_is_refused_for_the_one_before(tmp_path: Path, damage: str) -> None:
    """With a warning, whatever is damaged."""
    store = CheckpointStore(tmp_path, keep=3)
    store.save(1, {"step": 1}, write)
    path = store.save(2, {"step": 2}, write).path
    match damage:
        case "truncated":
            (path / "model" / "weights").write_bytes(b"w" * 999)
        case "changed":
            (path / "model" / "weights").write_bytes(b"w" * 999 + b"v")
        case "missing":
            (path / "trainer.pt").unlink()
        case "no manifest":
            (path / "manifest.json").unlink()
        case "half a manifest":
            (path / "manifest.json").write_text('{"step": 2,')
    latest = store.latest()
    assert latest is not None
    assert latest.state == {"step": 1}


def fail_to_read(monkeypatch: pytest.MonkeyPatch, folder: Path, number: int) -> None:
    """From here on, reading a file in `folder` fails with the error `number`."""

    def digest(path: Path) -> str:
        if path.is_relative_to(folder):
            raise OSError(number, os.strerror(number), str(path))
        return file_digest(path)

    monkeypatch.setattr(store_module, "file_digest", digest)


@pytest.mark.parametrize(
    "number", [errno.ESTALE, errno.ETIMEDOUT, errno.EIO, errno.EMFILE, errno.EACCES], ids=os.strerror
)
def test_a_checkpoint_that_cannot_be_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """To go on from an older one would have the next save delete it. The error names file, reason and remedy."""
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2):
        store.save(step, {}, write)
    fail_to_read(monkeypatch, tmp_path, number)
    reason = re.escape(os.strerror(number))
    unread = (
        rf"step-000002/(model/weights|trainer\.pt|state\.json) cannot be read: {reason}; mend the disk or its rights "
        r"and start again; to continue from step-000001 instead, move step-000002 away$"
    )
    with pytest.raises(SetupError, match=unread):
        store.latest()
    with pytest.raises(SetupError, match=unread):
        store.newest(before=3)
    with pytest.raises(SetupError, match=r"mend the disk or its rights and start again$"):
        store.newest(before=2)


@pytest.mark.parametrize("name", [".", "latest", "step-000002"])
def test_a_list_of_checkpoints_that_cannot_be_read_is_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The remedy is not to delete the folder."""
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2):
        store.save(step, {}, write)

    def refusing(call: Any) -> Any:
        def refuse(path: Any, *args: Any, **named: Any) -> Any:
            if Path(path) == tmp_path / name:
                raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return call(path, *args, **named)

        return refuse

    for module, call in ((os, "listdir"), (os, "stat"), (io, "open")):
        monkeypatch.setattr(module, call, refusing(getattr(module, call)))
    with pytest.raises(SetupError, match=rf"{re.escape(str(tmp_path / name))} cannot be read: Stale file handle; mend"):
        store.latest()


def test_a_checkpoint_that_a_live_run_deletes_is_read_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for an export of a run that goes on, whose trainer has saved the next step meanwhile."""
    trainer = CheckpointStore(tmp_path, keep=1)
    trainer.save(1, {}, write)
    next_steps = iter([2])

    def digest(path: Path) -> str:
        for step in next_steps:
            trainer.save(step, {}, write)
        return file_digest(path)

    monkeypatch.setattr(store_module, "file_digest", digest)
    latest = CheckpointStore(tmp_path, keep=1).latest()
    assert latest is not None
    assert latest.step == 2


def test_says_so_when_no_checkpoint_is_whole(tmp_path: Path) -> None:
    """Starting anew in silence would lose a run."""
    store = CheckpointStore(tmp_path, keep=3)
    path = store.save(1, {}, write).path
    (path / "model" / "weights").write_bytes(b"w" * 999)
    with pytest.raises(SetupError, match="step-000001: model/weights has 999 bytes instead of 1000"):
        store.latest()


def test_says_so_when_an_earlier_version_has_written_all(tmp_path: Path) -> None:
    """Its files have no digests, and its optimizer's state another form."""
    store = CheckpointStore(tmp_path, keep=3)
    path = store.save(1, {}, write).path
    (path / "manifest.json").write_text('{"step": 1, "sizes_bytes": {"model/weights": 1000}}')
    with pytest.raises(SetupError, match="step-000001: an earlier version of Penstock wrote it"):
        store.latest()


def test_digests_of_the_writer_are_those_that_a_reader_finds(tmp_path: Path) -> None:
    """A file that changed between its writing and its digest, or whose writer is wrong about it, is refused."""

    def write_and_tell(digest: str) -> Callable[[Path], dict[str, str]]:
        def write_all(folder: Path) -> dict[str, str]:
            write(folder)
            return {"model/weights": digest or file_digest(folder / "model/weights")}

        return write_all

    store = CheckpointStore(tmp_path, keep=3)
    store.save(1, {}, write_and_tell(""))
    store.save(2, {}, write_and_tell("0" * 16))
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1


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


def _number_from(script: str, folder: Path, argument: str) -> int:
    """Run a script of this module to its end, and return the last number that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), argument], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


_KILLED_EVERYWHERE = """
import json, os, shutil, sys
from pathlib import Path
from services.trainer.checkpoint.store import CheckpointStore

EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
root, before, moments = Path(sys.argv[1]), [int(step) for step in sys.argv[2].split(",")], 0

def write(folder):
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(b"w" * 100)

def save_and_die(folder, moment):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        seen += event in EVENTS
        if event in EVENTS and seen == moment:
            os._exit(9)
    sys.addaudithook(hook)
    CheckpointStore(folder, keep=1).save(3, {"life": 2}, write)
    os._exit(0)

for moment in range(1, 1000):
    folder = root / str(moment)
    for step in before:
        CheckpointStore(folder, keep=1).save(step, {"life": 1}, write)
    pid = os.fork()
    if pid == 0:
        save_and_die(folder, moment)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    successor = CheckpointStore(folder, keep=1)
    successor.claim()
    found = successor.latest()
    assert found is not None and found.step in (*before, 3), (moment, found)
    assert (found.model_path / "weights").read_bytes() == b"w" * 100
    again = successor.save(3, {"life": 3}, write)
    assert CheckpointStore(folder, keep=1).latest().state == {"life": 3}
    writers, *rest = sorted(os.listdir(folder))
    assert (rest, os.listdir(folder / writers)) == (["latest", "step-000003"], []), os.listdir(folder)
    if code == 0:
        print(moment)
        break
"""


@pytest.mark.parametrize("before", ["3", "2", "2,3"])
def test_a_trainer_killed_at_any_moment_of_saving_has_a_checkpoint(tmp_path: Path, before: str) -> None:
    """Before each change to the disk, also where the step is saved for the second time and there is no other."""
    assert _number_from(_KILLED_EVERYWHERE, tmp_path, before) > 5


_REPLACED_EVERYWHERE = """
import os, sys
from pathlib import Path
from penstock.errors import SupersededError
from services.trainer.checkpoint.store import CheckpointStore

EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open")
root, step = Path(sys.argv[1]), int(sys.argv[2])

def write(folder):
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(b"w" * 100)

def save_and_be_replaced(folder, moment):
    store, seen = CheckpointStore(folder, keep=1), 0
    store.claim()

    def hook(event, arguments):
        nonlocal seen
        if event in EVENTS:
            seen += 1
            if seen == moment:
                successor = CheckpointStore(folder, keep=1)
                successor.claim()
                assert successor.latest() is not None
                successor.save(step, {"life": 2}, write)
    sys.addaudithook(hook)
    try:
        store.save(3, {"life": 1}, write)
    except SupersededError as error:
        assert "another trainer has taken over" in str(error)
        os._exit(1)
    os._exit(0 if seen < moment else 2)

codes = []
for moment in range(1, 1000):
    folder = root / str(moment)
    CheckpointStore(folder, keep=1).save(3, {"life": 0}, write)
    pid = os.fork()
    if pid == 0:
        try:
            save_and_be_replaced(folder, moment)
        finally:
            os._exit(9)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    codes.append(code)
    if code == 0:
        break
    assert code in (1, 2), (moment, code)
    found = CheckpointStore(folder, keep=1).latest()
    assert (found.step, found.state) == (step, {"life": 2}), (moment, code, found)
    assert (found.model_path / "weights").read_bytes() == b"w" * 100
    writers, *rest = sorted(os.listdir(folder))
    assert rest == ["latest", found.path.name], (moment, code, os.listdir(folder))
print(codes.count(1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", ["2", "3", "4"])
def test_a_trainer_that_is_replaced_while_it_saves_changes_nothing_of_its_successors(tmp_path: Path, step: str) -> None:
    """Whatever it is about to do when the successor starts and saves: an earlier step, the same one, or a later one."""
    assert _number_from(_REPLACED_EVERYWHERE, tmp_path, step) > 10


def test_says_so_when_the_checkpoints_are_gone(tmp_path: Path) -> None:
    """What is left says that there were some: to start anew would give up the run."""
    store = CheckpointStore(tmp_path, keep=1)
    store.save(7, {}, write)
    (tmp_path / "step-000007").rename(tmp_path / "moved")
    with pytest.raises(SetupError, match=r"latest names step-000007, but .* holds no checkpoint"):
        store.latest()
