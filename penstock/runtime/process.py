"""Runs a process: one coroutine, until it is done or a signal asks it to stop."""

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import structlog

from penstock.errors import PenstockError, UserError

log = structlog.get_logger()

ResultT = TypeVar("ResultT")

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CANCEL_EVERY_S = 0.5
_CANCELLED_GRACE_S = 10.0
"""Seconds for a cancelled process to end in order: a launcher first kills its processes."""
EXIT_FAILURE = 1
"""Exit code of all other failures."""
EXIT_USER_ERROR = 2
"""Exit code when a person must change something."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the number of SIGINT."""


def run(
    main: Callable[[asyncio.Event], Awaitable[None]], *, error_file: Path | None = None, stopped_code: int = 0
) -> int:
    """Run `main(stop)` and return the exit code.

    SIGINT, SIGTERM and SIGHUP set `stop`, upon which `main` must end in order; a second signal cancels it, unless it is
    SIGHUP, which a closed terminal and its shell both send. If `main`, or a thread of the loop that it began, has not
    ended 10 s after that, the process exits with 130, since nothing can interrupt a thread that waits. Where SIGHUP is
    ignored, as under nohup, it stays so. All of these signals are unblocked first, because a thread of Ray that blocks
    one hands that down to the processes that it starts. An error that Penstock raised on purpose is printed, a
    `UserError` as one line; the log gets the traceback of any other. The open-file limit is raised to the hard limit.

    Args:
        main: The process's work.
        error_file: Also gets the error, for the program that started this process.
        stopped_code: Exit code if `main` ended in order after a signal.
    """
    _raise_file_limit()
    try:
        was_stopped = asyncio.run(_until_signalled(main))
    except PenstockError as error:
        if not isinstance(error, UserError):
            log.error("process.failed", exc_info=error)
        return report_error(error, file=error_file)
    except asyncio.CancelledError:
        return EXIT_FAILURE
    return stopped_code if was_stopped else 0


def report_error(error: PenstockError, *, file: Path | None = None) -> int:
    """Write the error to standard error, a `UserError` as one line, and return its exit code.

    The code tells whether another start helps, so it is returned also where nothing can be written, as on a full disk.

    Args:
        error: The error that ends this process.
        file: Also gets the error, as one JSON object {"error": its class, "message": its text}.
    """
    is_users = isinstance(error, UserError)
    message = " ".join(line.strip() for line in str(error).splitlines()) if is_users else str(error)
    if file is not None:
        with suppress(OSError):
            file.write_text(json.dumps({"error": type(error).__name__, "message": message}) + "\n")
    if sys.stderr is not None:  # it is None if it was closed at the start
        with suppress(OSError, ValueError):
            sys.stderr.write(f"error: {message}\n")
    return EXIT_USER_ERROR if is_users else EXIT_FAILURE


async def unless_stopped(pending: Coroutine[Any, Any, ResultT], stop: asyncio.Event) -> ResultT | None:
    """Await `pending`; if `stop` comes first, cancel it and return None.

    If it completed anyway, because the cancellation came too late, its result is returned: no finished work is lost.
    """
    working = asyncio.ensure_future(pending)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await end_task(working)
        return None if working.cancelled() else working.result()
    finally:
        stopping.cancel()
        working.cancel()


async def completed(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Await `work` to its end also if this is cancelled meanwhile; the cancellation, or its failure, comes after it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        task.result()
        raise


async def end_task(task: asyncio.Future[Any]) -> None:
    """Cancel a task until it has ended: up to Python 3.11 `asyncio.wait_for`, which nats-py uses, swallows a
    cancellation that arrives together with the answer."""
    try:
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_EVERY_S)
    finally:
        task.cancel()  # also if this call is cancelled itself


@asynccontextmanager
async def beside(pending: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `pending`, which ends only by an error, during the context; then the body is cancelled, and the error raised.

    The body, which is the task that entered the context, is cancelled until it has ended, for the reason of `end_task`.
    If it ends by an error of its own, that one is raised, and the error of `pending` is logged.
    """
    body, has_ended, num_cancels = asyncio.current_task(), False, 0
    assert body is not None

    def cancel_body() -> None:
        nonlocal num_cancels
        if not has_ended:
            num_cancels += 1
            body.cancel()
            body.get_loop().call_later(_CANCEL_EVERY_S, cancel_body)

    def on_end(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            cancel_body()

    running = asyncio.create_task(pending)
    running.add_done_callback(on_end)
    try:
        yield
    except asyncio.CancelledError:
        if num_cancels == 0 or body.cancelling() > num_cancels:  # cancelled from outside
            raise
    except Exception:
        if running.done() and not running.cancelled():
            log.warning("background_task.failed", error=repr(running.exception()))
        raise
    finally:
        has_failed, has_ended = running.done() and not running.cancelled(), True
        for _ in range(num_cancels):
            body.uncancel()
        await end_task(running)
    if has_failed:
        running.result()


@contextmanager
def others_code() -> Iterator[None]:
    """Await other people's code in this context: what it raises to end its task or process becomes a failure of that
    code.

    Otherwise the awaiting task would look as if it had been cancelled, which nobody reports; SystemExit of a task ends
    the whole event loop; and what else is no Exception, such as a panic of Rust code, passes every `except Exception`.

    Raises:
        RuntimeError: CancelledError came, and nobody has cancelled this task; or another error that is no Exception,
            KeyboardInterrupt excepted.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError(
            "CancelledError came out of it, and nobody has cancelled it: it awaits a task that it has cancelled; catch "
            "that there"
        ) from error
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(repr(error)) from error


def _raise_file_limit() -> None:
    """Raise the open-file limit: every connection takes a descriptor, even a refused one, and 1024 is soon reached."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _until_signalled(main: Callable[[asyncio.Event], Awaitable[None]]) -> bool:
    """Run `main`; return whether a signal asked it to stop."""
    stop, was_signalled = asyncio.Event(), False
    task = asyncio.ensure_future(main(stop))
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        nonlocal was_signalled
        if was_signalled and number != signal.SIGHUP:
            task.cancel()
            loop.call_later(_CANCELLED_GRACE_S, _leave)  # also while the loop waits for its threads, after `main`
        was_signalled = True
        stop.set()
        log.info("signal.received", signal=number.name)

    for number in _STOPPING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, on_signal, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    try:
        await task
    except BaseExceptionGroup as group:  # a TaskGroup wraps its tasks' errors; people want the error itself
        if (error := _first_reported(group)) is None:
            raise
        raise error from None
    return was_signalled


def _leave() -> None:
    try:
        log.warning("process.left", reason=f"it did not end within {_CANCELLED_GRACE_S:g} s after a second signal")
    finally:  # a log that cannot be written must not keep it
        os._exit(EXIT_INTERRUPTED)


def _first_reported(group: BaseExceptionGroup[BaseException]) -> PenstockError | None:
    """Return the error of a group to show: its first `UserError`, or else its first `PenstockError`.

    None if the group also holds an error that was not raised on purpose: a bug, whose traceback must not be lost.
    """
    if group.split(PenstockError)[1] is not None:
        return None
    wanted, _ = group.split(UserError)
    error: BaseException = wanted or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, PenstockError)
    return error
