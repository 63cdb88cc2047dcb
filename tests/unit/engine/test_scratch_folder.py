"""The temporary files of an engine go with it."""

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import SetupError
from penstock.runtime.children.parent_death import dying_with_parent
from services.rollout.engine.scratch_folder import note_segments, scratch_folder
from tests.support.processes import is_alive
from tests.support.waiting import until

_HOLD = """
import tempfile, time
from services.rollout.engine.scratch_folder import scratch_folder
with scratch_folder() as folder:
    tempfile.NamedTemporaryFile(delete=False)
    print(folder, flush=True)
    time.sleep(600)
"""

_SHARE = """
import mmap, os, subprocess, sys, time
from services.rollout.engine.scratch_folder import note_segments, scratch_folder
def share(name):
    with open("/dev/shm/" + name, "wb+") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)
with scratch_folder() as folder:
    mapped = [share(name) for name in sys.argv[1:3]]
    if os.fork() == 0:
        mapped.append(share(sys.argv[3]))
        print(os.getpid(), flush=True)
        time.sleep(600)
    sys.stdin.readline()
    note_segments(folder)
    print(flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR of this test, with a path as short as a user's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def test_files_are_made_in_the_folder_and_removed_with_it(parent: Path) -> None:
    """Those of this process and, by TMPDIR, of its children; afterwards everything is as before."""
    with scratch_folder() as folder, scratch_folder() as inner:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            assert Path(file.name).parent == inner
        assert os.environ["TMPDIR"] == str(inner)
        assert inner.parent == folder
    assert (tempfile.gettempdir(), os.environ["TMPDIR"]) == (str(parent), str(parent))
    assert list(parent.iterdir()) == []


def test_a_socket_fits_however_long_tmpdir_is(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own sockets would not: batch systems and macOS give long ones."""
    for length in range(60, 100):
        longer = parent / ("x" * (length - len(str(parent)) - 1))
        longer.mkdir()
        monkeypatch.setenv("TMPDIR", str(longer))
        monkeypatch.setattr(tempfile, "tempdir", None)
        with scratch_folder(), socket.socket(socket.AF_UNIX) as listener:
            with tempfile.NamedTemporaryFile(delete=False) as file:
                pass
            os.remove(file.name)
            listener.bind(file.name)
        assert list(longer.iterdir()) == []


async def test_what_a_killed_process_left_is_removed_by_the_next_and_nothing_that_is_in_use(parent: Path) -> None:
    """Nothing runs after kill -9, so somebody else must; another engine's folder and other people's stay."""
    others = {parent / name for name in ("somebody-elses", "penstock-test-x", "penstock-engine-logs")}
    for folder in others:
        folder.mkdir()
    killed, living = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", _HOLD, stdout=asyncio.subprocess.PIPE, preexec_fn=dying_with_parent()
        )
        for _ in range(2)
    ]
    try:
        folders = []
        for process in (killed, living):
            assert process.stdout is not None
            folders.append(Path((await process.stdout.readline()).decode().strip()))
        killed.send_signal(signal.SIGKILL)
        await killed.wait()
        assert list(folders[0].iterdir())
        with scratch_folder() as own:
            assert set(parent.iterdir()) == {folders[1], own, *others}
            assert list(folders[1].iterdir())
    finally:
        living.kill()
        await living.wait()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOSPC])
def test_a_folder_without_locks_is_refused_and_not_left(
    parent: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As of Lustre mounted without flock; each try would leave another folder."""

    def refuse(_: int, __: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(SetupError, match=f"{os.strerror(number)}; set TMPDIR"), scratch_folder():
        raise AssertionError
    assert list(parent.iterdir()) == []


async def test_segments_of_shared_memory_go_with_the_folder(parent: Path) -> None:
    """SGLang's own, of children too, when the next engine starts; others' and those that were not mapped stay."""
    mark = uuid.uuid4().hex[:12]
    loads, queue, other, unmapped = (f"{kind}_{mark}" for kind in ("sglang_loads", "sgl_shm_mq", "psm", "sgl_shm_mm"))
    segments = {name: Path("/dev/shm", name) for name in (loads, queue, other, unmapped)}
    segments[unmapped].touch()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SHARE, loads, other, queue, stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, preexec_fn=dying_with_parent(), start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        child = int(await process.stdout.readline())
        process.stdin.write(b"\n")
        await process.stdout.readline()
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await until(lambda: not is_alive(child))  # it has the folder's lock, too
        assert all(path.exists() for path in segments.values())
        with scratch_folder():
            assert {name for name, path in segments.items() if path.exists()} == {other, unmapped}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for path in segments.values():
            path.unlink(missing_ok=True)


def test_only_names_of_sglang_s_segments_are_removed(parent: Path, tmp_path: Path) -> None:
    """Whatever stands in the note of a folder."""
    precious = tmp_path / "precious"
    precious.touch()
    with scratch_folder() as folder:
        note_segments(folder)
        (folder / ".shared-memory").write_text(f"../..{precious}\nsgl_shm_/../../..{precious}\n{precious}")
    assert precious.exists()
