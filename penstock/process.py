"""The life of a process: one coroutine that runs until it is done or a signal asks it to stop."""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import structlog

from penstock.errors import UserError

log = structlog.get_logger()

ResultT = TypeVar("ResultT")

EXIT_USER_ERROR = 2
"""Exit code when a person must change something."""


_PR_SET_PDEATHSIG = 1


def dying_with_parent() -> Callable[[], None]:
    """A `preexec_fn` after which the child is killed when the thread that started it ends, however that ends.

    It holds for the child only: the child's own children need the same, or their process group has to be killed.
    """
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    def set_death_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return set_death_signal


def run(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Run `main(stop)` and return the exit code.

    SIGINT and SIGTERM set `stop`, upon which `main` is to end in order; a second signal cancels it. A `UserError` is
    printed as one line without a traceback.
    """
    try:
        asyncio.run(_until_signalled(main))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    except asyncio.CancelledError:
        return 1
    return 0


async def unless_stopped(pending: Coroutine[Any, Any, ResultT], stop: asyncio.Event) -> ResultT | None:
    """Await `pending`; when `stop` comes first, cancel it and return None."""
    working = asyncio.ensure_future(pending)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        stopping.cancel()
        working.cancel()


async def _until_signalled(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    task = asyncio.ensure_future(main(stop))
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        log.info("signal.received", signal=number.name)
        if stop.is_set():
            task.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await task
    except* UserError as group:  # a TaskGroup wraps what its tasks raise; a person wants the error itself
        raise _first(group) from None


def _first(group: BaseExceptionGroup[UserError]) -> UserError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, UserError)
    return error
