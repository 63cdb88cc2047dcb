"""Shows viewers that a trainer works in the run folder: it keeps `.trainer.lock` locked until it ends.

The kernel frees the lock however the process ends. The lock keeps no other trainer out: that one on the bus does.
"""

import asyncio
import fcntl
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TextIO, TypeVar

import structlog

from penstock.runtime.own_thread import run_in_own_thread
from penstock.runtime.process import end_task

log = structlog.get_logger()

ResultT = TypeVar("ResultT")

_FILE: Final = ".trainer.lock"
_TRY_EVERY_S: Final = 1.0
_ANSWER_S: Final = 5.0
"""Seconds that a file system may take for each call. NFS whose lockd cannot be reached never answers."""


@asynccontextmanager
async def shown_as_running(folder: Path) -> AsyncIterator[None]:
    """Hold the lock in the run folder during the context, where its file system has locks.

    While a viewer looks at the lock, or a trainer that was replaced still holds it, this goes on and tries again.
    """
    has_tried = asyncio.Event()
    holding = asyncio.create_task(_hold(folder / _FILE, has_tried))
    try:
        await has_tried.wait()
        yield
    finally:
        await end_task(holding)


async def _hold(path: Path, has_tried: asyncio.Event) -> None:
    """Lock a file, and keep it locked until this is cancelled."""
    try:
        with await _answered(functools.partial(path.open, "a")) as file:
            while not await _answered(functools.partial(_lock, file)):
                has_tried.set()
                await asyncio.sleep(_TRY_EVERY_S)
            has_tried.set()
            await asyncio.Event().wait()  # its end is the cancellation
    except OSError as error:
        log.warning(
            "run_folder.not_locked",
            path=str(path),
            reason=str(error),
            effect="`penstock view` and `penstock status` say `not running` of a run without a launcher",
        )
    finally:
        has_tried.set()


async def _answered(call: Callable[[], ResultT]) -> ResultT:
    """Return the result of a call to the file system.

    Raises:
        OSError: it failed, or did not return in time.
    """
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await run_in_own_thread(call, name="running_lock")
    except TimeoutError:
        raise TimeoutError(f"its file system did not answer within {_ANSWER_S:g} s") from None


def _lock(file: TextIO) -> bool:
    """Lock an open file; return whether nobody else holds the lock.

    Raises:
        OSError: its file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
