"""What a launcher does beside its processes. A failure there never ends the run."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import structlog

log = structlog.get_logger()


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` beside the context. If it fails, the run goes on and the launcher's log has the traceback."""
    task = asyncio.create_task(work)
    task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def repeated(work: Callable[[], Awaitable[None]], *, every_s: float) -> None:
    """Do `work` again and again, `every_s` seconds after its end, also if a disk or network folder fails.

    Such a folder may come back. Each failure is logged once, until another one follows.
    """
    failure = ""
    while True:
        try:
            await work()
        except OSError as error:
            if str(error) != failure:
                failure = str(error)
                log.warning("display.retried", error=failure)
        await asyncio.sleep(every_s)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("display.failed", exc_info=error)
