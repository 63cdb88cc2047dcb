"""How a trainer shows that its run goes on, to those who look at the folder."""

import asyncio
import errno
import fcntl
import io
import sys
import threading
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest
import structlog

from services.trainer.telemetry import running_lock
from services.trainer.telemetry.running_lock import shown_as_running
from services.view.run_reader import RunReader
from tests.support.waiting import HANG_S, promptly, until


async def test_a_run_is_running_while_its_trainer_works(tmp_path: Path) -> None:
    """It has no launcher, and is not running before and after."""
    run = RunReader(tmp_path)
    for _ in range(2):  # the file stays, and says nothing by itself
        assert not run.is_running
        async with shown_as_running(tmp_path):
            assert (run.is_running, run.has_launcher) == (True, False)
    assert not run.is_running


async def test_a_trainer_waits_for_nobody_who_holds_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for a viewer nor for a trainer that was replaced and has not ended; it takes the lock after them."""
    monkeypatch.setattr(running_lock, "_TRY_EVERY_S", 0.0)
    with (tmp_path / ".trainer.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        async with shown_as_running(tmp_path):
            assert not RunReader(tmp_path).is_running
            fcntl.flock(other, fcntl.LOCK_UN)
            await until(lambda: RunReader(tmp_path).is_running)


async def test_a_trainer_s_children_do_not_keep_the_lock(tmp_path: Path) -> None:
    """The run would seem to go on if one outlived it."""
    async with shown_as_running(tmp_path):
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "print(flush=True); input()"), stdin=PIPE, stdout=PIPE, close_fds=False
        )
        assert child.stdout is not None
        await promptly(child.stdout.readline())
    assert not RunReader(tmp_path).is_running
    assert child.returncode is None
    await promptly(child.communicate(b"\n"))


async def test_a_file_system_without_locks_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre that is mounted without flock, and NFS without lockd: a warning says what is missed."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with structlog.testing.capture_logs() as logs:
        async with shown_as_running(tmp_path):
            assert not RunReader(tmp_path).is_running
    [warning] = logs
    assert (warning["event"], warning["log_level"]) == ("run_folder.not_locked", "warning")
    assert "No locks available" in warning["reason"]


async def test_a_lock_that_comes_late_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log takes its warning back."""
    take, answer = fcntl.flock, threading.Event()

    def flock(file: Any, operation: int) -> None:
        answer.wait()
        take(file, operation)

    monkeypatch.setattr(running_lock, "_ANSWER_S", 0.1)
    monkeypatch.setattr(running_lock, "_TRY_EVERY_S", 0.0)
    monkeypatch.setattr(fcntl, "flock", flock)
    try:
        with structlog.testing.capture_logs() as logs:
            async with shown_as_running(tmp_path):
                assert [line["event"] for line in logs] == ["run_folder.not_locked"]
                answer.set()
                await until(lambda: RunReader(tmp_path).is_running)
                await until(lambda: len(logs) > 1)
    finally:
        answer.set()
    [_, line] = logs
    assert (line["event"], line["log_level"]) == ("run_folder.locked", "info")


@pytest.mark.timeout(HANG_S)
def test_a_file_system_that_never_answers_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS whose lockd cannot be reached blocks in spite of LOCK_NB; neither the trainer's start nor its end waits.

    `asyncio.run` waits for the threads of its loop's pool.
    """

    async def train() -> None:
        async with shown_as_running(tmp_path):
            await asyncio.to_thread(asked.wait, HANG_S)

    asked, answer = threading.Event(), threading.Event()

    def flock(*_: object) -> None:
        asked.set()
        answer.wait()

    monkeypatch.setattr(running_lock, "_ANSWER_S", 0.1)
    monkeypatch.setattr(fcntl, "flock", flock)
    try:
        with structlog.testing.capture_logs() as logs:
            asyncio.run(train())
    finally:
        answer.set()
    [warning] = logs
    assert warning["event"] == "run_folder.not_locked"
    assert "its file system has not answered for 0.1 s" in warning["reason"]
    assert asked.is_set()


async def test_a_file_system_that_answers_no_longer_holds_up_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing a locked file on NFS asks its server. The event loop goes on meanwhile, and so does the trainer after a
    while."""
    closing, answer = list[threading.Thread](), threading.Event()

    class Stuck(io.FileIO):
        def close(self) -> None:
            closing.append(threading.current_thread())
            try:
                if closing != [threading.main_thread()]:  # which would wait for itself
                    answer.wait(HANG_S)
            finally:
                super().close()

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda path, mode: Stuck(path, mode))
        async with shown_as_running(tmp_path):
            monkeypatch.setattr(running_lock, "_ANSWER_S", 1.0)  # of its end
    [thread] = closing
    assert thread is not threading.main_thread()
    assert thread.is_alive()
    answer.set()
    await asyncio.to_thread(thread.join)
