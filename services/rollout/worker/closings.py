"""Closes what a group's samples hold, environments for example, beside the group's verdicts and its delivery.

Invariant: when the context of a group ends, everything is closed. So a worker never has more environments than samples
of the groups in hand, and leaves none behind when it stops.
"""

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog

from penstock.runtime.process import end_task

log = structlog.get_logger()

ResultT = TypeVar("ResultT")


class Closings:
    """What one group still has to close. As a context it is around the group's play and its delivery."""

    def __init__(self) -> None:
        """Begin with nothing to close."""
        self._running: list[asyncio.Task[None]] = []

    def begin(self, closing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `closing` until the context ends; it has a deadline and reports its own errors."""
        task = asyncio.create_task(closing)
        self._running.append(task)
        return task

    async def result_of(self, play: Callable[[Callable[[ResultT], None]], Coroutine[Any, Any, None]]) -> ResultT:
        """Run `play(tell)` and return what it tells; then it goes on in its own task, to close what it has opened.

        If this call is cancelled first, `play` is cancelled.

        Raises:
            BaseException: what `play` raised in place of telling.
        """
        told: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        playing = self.begin(play(told.set_result))
        either: set[asyncio.Future[Any]] = {told, playing}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not told.done():
                playing.cancel()
        if not told.done():
            playing.result()
        return told.result()

    async def __aenter__(self) -> Self:
        """Begin."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until everything is closed, even if the body was cancelled; cancelling this wait cuts the rest short."""
        try:
            if self._running:
                await asyncio.wait(self._running)
        finally:
            await asyncio.gather(*map(end_task, self._running))
            for task in self._running:
                if not task.cancelled() and (left := task.exception()) is not None:
                    log.debug("closing.failed", error=repr(left))  # also what `result_of` has raised
