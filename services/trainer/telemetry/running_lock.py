"""Shows viewers that a trainer works in the run folder: it keeps `.trainer.lock` locked until it ends.

The kernel frees the lock however the process ends. This lock keeps no other trainer out; the one on the bus does.
"""

import asyncio
import fcntl
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, TextIO

import structlog

from penstock.runtime.own_thread import run_in_own_thread
from penstock.runtime.process import end_task

log = structlog.get_logger()

_FILE: Final = ".trainer.lock"
_TRY_EVERY_S: Final = 1.0
_ANSWER_S: Final = 5.0
"""Seconds for which start and end wait for the file system. NFS whose lockd cannot be reached never answers."""


@asynccontextmanager
async def shown_as_running(folder: Path) -> AsyncIterator[None]:
    """Hold the lock in the run folder during the context, where its file system has locks.

    The context goes on without it while a viewer looks at the lock, a trainer that was replaced still holds it, or the
    file system does not answer.
    """
    path = folder / _FILE
    has_tried, is_late = asyncio.Event(), asyncio.Event()
    holding = asyncio.create_task(_hold(path, has_tried, is_late))
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await has_tried.wait()
        if not has_tried.is_set():
            is_late.set()
            _warn(path, f"its file system has not answered for {_ANSWER_S:g} s")
        yield
    finally:
        holding.cancel()
        await asyncio.wait({holding}, timeout=_ANSWER_S)
        await end_task(holding)


async def _hold(path: Path, has_tried: asyncio.Event, is_late: asyncio.Event) -> None:
    """Lock a file, and keep it locked until this is cancelled; log the lock if it `is_late`, after a warning."""
    try:
        file = await run_in_own_thread(functools.partial(path.open, "a"), name="running_lock")
        try:
            while not await run_in_own_thread(functools.partial(_lock, file), name="running_lock"):
                has_tried.set()
                await asyncio.sleep(_TRY_EVERY_S)
            has_tried.set()
            if is_late.is_set():
                log.info("run_folder.locked", path=str(path))
            await asyncio.Event().wait()  # its end is the cancellation
        finally:
            await run_in_own_thread(file.close, name="running_lock")
    except OSError as error:
        _warn(path, str(error))
    finally:
        has_tried.set()


def _warn(path: Path, reason: str) -> None:
    log.warning(
        "run_folder.not_locked",
        path=str(path),
        reason=reason,
        effect="without a launcher, `penstock status`, `view` and `runs delete --keep-bus` take the run for ended",
    )


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
