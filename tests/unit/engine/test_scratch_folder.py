"""The temporary files of an engine go with it."""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.runtime.parent_death import dying_with_parent
from services.rollout.engine.scratch_folder import scratch_folder

_HOLD = """
import tempfile, time
from services.rollout.engine.scratch_folder import scratch_folder
with scratch_folder() as folder:
    tempfile.NamedTemporaryFile(delete=False)
    print(folder, flush=True)
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
