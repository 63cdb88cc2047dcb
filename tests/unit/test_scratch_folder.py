"""The temporary files of an engine go with it."""

import asyncio
import os
import signal
import sys
import tempfile
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
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR of this test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_files_are_made_in_the_folder_and_removed_with_it(parent: Path) -> None:
    """Those of this process and, by TMPDIR, of its children; afterwards everything is as before."""
    with scratch_folder() as folder, scratch_folder() as inner:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            assert Path(file.name).parent == inner
        assert os.environ["TMPDIR"] == str(inner)
        assert inner.parent == folder
    assert (tempfile.gettempdir(), os.environ["TMPDIR"]) == (str(parent), str(parent))
    assert list(parent.iterdir()) == []


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
