"""What becomes of an error that ends a process."""

import asyncio
import contextlib
import fcntl
import os
import pty
import resource
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import DataError, SetupError, UnavailableError
from penstock.runtime.process import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    completed,
    end_task,
    others_code,
    run,
    unless_stopped,
)
from tests.conftest import ROOT
from tests.support.waiting import HANG_S


def ending(*errors: Exception) -> int:
    """The exit code of a process whose tasks end with `errors`, at once."""

    async def fail(error: Exception) -> None:
        raise error

    async def main(stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            for number, error in enumerate(errors):
                (inner, outer)[number % 2].create_task(fail(error))

    return run(main)


@pytest.mark.parametrize(
    ("errors", "code", "line"),
    [
        ([DataError("row 3\n  is wrong")], EXIT_USER_ERROR, "error: row 3 is wrong\n"),
        ([UnavailableError("nobody answers")], EXIT_FAILURE, "error: nobody answers\n"),
        (
            [UnavailableError("nobody answers"), SetupError("port 7 is in use")],
            EXIT_USER_ERROR,
            "error: port 7 is in use\n",
        ),
    ],
)
def test_an_error_out_of_a_task_group_is_one_line(
    capsys: pytest.CaptureFixture[str], errors: list[Exception], code: int, line: str
) -> None:
    """The groups around it are not shown; what a person can mend goes first."""
    assert ending(*errors) == code
    assert capsys.readouterr().err == line


def test_a_process_may_open_as_many_files_as_the_system_allows() -> None:
    """Whatever it was started with: a server with 1024 descriptors is closed by a thousand idle connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
    try:
        assert ending() == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_bug_keeps_its_traceback() -> None:
    """An error that nobody raised on purpose is not hidden behind one that somebody did."""
    with pytest.raises(BaseExceptionGroup) as caught:
        ending(UnavailableError("nobody answers"), ZeroDivisionError("a bug"))
    assert caught.group_contains(ZeroDivisionError)


_PROGRAM = """
import sys
from penstock.telemetry import log
from penstock.runtime import process
from penstock.config import LogConfig

async def main(stop):
    sys.stdout.write("running\\n")
    sys.stdout.flush()
    await stop.wait()
    log.structlog.get_logger().info("last.words")

log.configure(LogConfig(), service="test")
sys.exit(process.run(main))
"""


async def test_a_process_whose_log_nobody_reads_any_more_still_ends_in_order() -> None:
    """The reader of its standard error is gone; a signal stops it all the same."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PROGRAM), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(HANG_S):
        assert await process.stdout.readline() == b"running\n"
        process.stderr._transport.close()  # type: ignore[attr-defined]  # the reading end of the pipe
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


_PATIENT_PROGRAM = """
import asyncio, sys
from penstock.telemetry import log
from penstock.runtime import process
from penstock.config import LogConfig

async def main(stop):
    print("running", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    await asyncio.to_thread(sys.stdin.readline)

log.configure(LogConfig(), service="test")
sys.exit(process.run(main))
"""


async def patient_process(begin: Callable[[], object]) -> asyncio.subprocess.Process:
    """Start a process that calls `begin`, and after a signal reads a line before it ends; wait until it runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PATIENT_PROGRAM),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=begin,
    )
    assert process.stdout is not None
    async with asyncio.timeout(HANG_S):
        assert await process.stdout.readline() == b"running\n"
    return process


async def test_a_closed_terminal_ends_a_process_in_order() -> None:
    """The shell sends the same signal once more, which does not count as a second one."""
    ours, terminal = pty.openpty()

    def begin() -> None:
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup

    process = await patient_process(begin)
    os.close(terminal)
    assert process.stdout is not None
    try:
        os.close(ours)
        async with asyncio.timeout(HANG_S):
            assert await process.stdout.readline() == b"stopping\n"
            process.send_signal(signal.SIGHUP)
            _, log = await process.communicate(b"\n")
        assert (process.returncode, log.count(b"SIGHUP")) == (0, 2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def test_a_process_under_nohup_outlives_its_terminal() -> None:
    """It was asked to."""
    process = await patient_process(lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    try:
        async with asyncio.timeout(HANG_S):
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGTERM)
            _, log = await process.communicate(b"\n")
        assert process.returncode == 0
        assert b"SIGTERM" in log
        assert b"SIGHUP" not in log
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_process_whose_parent_blocks_signals_is_stopped_by_them(number: signal.Signals) -> None:
    """Threads of Ray block some, and a child inherits that; SGLang's engines could then only be killed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PROGRAM),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM}),
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(HANG_S):
            assert await process.stdout.readline() == b"running\n"
            process.send_signal(number)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


_STUCK_PROGRAM = """
import asyncio, sys, threading
from penstock.telemetry import log
from penstock.runtime import process
from penstock.config import LogConfig

async def main(stop):
    stuck = asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    print("running", flush=True)
    await {awaited}

log.configure(LogConfig(), service="test")
process._CANCELLED_GRACE_S = 0.0
sys.exit(process.run(main))
"""


@pytest.mark.parametrize("awaited", ["stuck", "stop.wait()"])
async def test_a_second_signal_ends_a_process_whose_thread_never_ends(awaited: str) -> None:
    """As one that reads a checkpoint from a disk that hangs; also if all else has ended in order."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _STUCK_PROGRAM.format(awaited=awaited)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(HANG_S):
            assert await process.stdout.readline() == b"running\n"
            process.send_signal(signal.SIGINT)
            assert b"signal.received" in await process.stderr.readline()
            process.send_signal(signal.SIGINT)
            assert await process.wait() == EXIT_INTERRUPTED
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_what_was_done_although_stop_came_is_returned() -> None:
    """Up to Python 3.11 `asyncio.wait_for` swallows a cancellation that comes with the answer."""
    stop, done = asyncio.Event(), []

    async def take() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            done.append("taken")
        return "a batch"

    asyncio.get_running_loop().call_soon(stop.set)
    assert await unless_stopped(take(), stop) == "a batch"
    assert done == ["taken"]


async def test_stop_ends_what_waits() -> None:
    """And leaves nothing behind."""
    stop = asyncio.Event()
    stop.set()
    assert await unless_stopped(asyncio.Event().wait(), stop) is None


async def test_what_is_to_be_completed_outlives_a_cancellation() -> None:
    """It ends before whoever awaited it does, who is still cancelled."""
    may_end, done = asyncio.Event(), list[str]()

    async def work() -> None:
        await may_end.wait()
        done.append("work")

    async def wait_for_it() -> None:
        try:
            await completed(work())
        finally:
            done.append("who waited")

    waiting = asyncio.create_task(wait_for_it())
    await asyncio.sleep(0)
    waiting.cancel()
    asyncio.get_running_loop().call_later(0.01, may_end.set)
    await asyncio.wait((waiting,))
    assert waiting.cancelled()
    assert done == ["work", "who waited"]


async def test_a_task_that_swallowed_a_cancellation_ends_though_its_ending_is_interrupted() -> None:
    """Whoever ends the task that ends it cancels at the same intervals."""
    num_cancelled = 0

    async def swallow_one() -> None:
        nonlocal num_cancelled
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                num_cancelled += 1
                if num_cancelled > 1:
                    raise

    inner = asyncio.create_task(swallow_one())
    await asyncio.sleep(0)
    ending_inner = asyncio.create_task(end_task(inner))
    while num_cancelled == 0:
        await asyncio.sleep(0)
    ending_inner.cancel()
    await asyncio.wait({ending_inner, inner}, timeout=HANG_S)
    assert ending_inner.cancelled()
    assert inner.cancelled()


class Panic(BaseException):
    """As pyo3 raises one for a panic of Rust code."""


@pytest.mark.parametrize("error", [Panic("index out of bounds"), SystemExit(3)])
def test_what_is_no_exception_is_a_failure_of_the_code_that_raises_it(error: BaseException) -> None:
    """Whoever catches every Exception of other people's code catches it too."""
    with pytest.raises(RuntimeError) as caught, others_code():
        raise error
    assert str(caught.value) == repr(error)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyError("board"), KeyboardInterrupt(), GeneratorExit()])
def test_other_errors_of_other_people_s_code_stay_what_they_are(error: BaseException) -> None:
    """An exception, an interrupt, and the end of a generator."""
    with pytest.raises(type(error)) as caught, others_code():
        raise error
    assert caught.value is error


@pytest.mark.parametrize(("signalled", "code"), [(True, 143), (False, 0)])
def test_an_orderly_end_after_a_signal_can_have_a_code_of_its_own(signalled: bool, code: int) -> None:
    """Kubernetes takes 0 for the end of the work, also of a trainer that it has evicted itself."""

    async def main(stop: asyncio.Event) -> None:
        if signalled:
            signal.raise_signal(signal.SIGTERM)
            await stop.wait()

    assert run(main, stopped_code=143) == code
    assert run(main) == 0


_ENDING = """
import sys
from pathlib import Path
from penstock.errors import SetupError
from penstock.runtime.process import run

async def main(stop):
    raise SetupError("the disk is full")

sys.exit(run(main, error_file=Path(sys.argv[1])))
"""


@pytest.mark.parametrize(
    ("stderr", "error_file"),
    [("2> /dev/full", "error.json"), ("2>&-", "error.json"), ("2> >(exit)", "error.json"), ("", "/dev/full")],
)
def test_the_exit_code_says_it_where_nothing_can_be_written(tmp_path: Path, stderr: str, error_file: str) -> None:
    """Another start would not help, and whoever starts processes again goes by the code."""
    command = f"sleep 0.2; exec {sys.executable} -c '{_ENDING}' {error_file} {stderr}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == EXIT_USER_ERROR
    if stderr:
        assert "the disk is full" in (tmp_path / error_file).read_text()
    else:
        assert done.stderr == "error: the disk is full\n"
