"""Bounds the share of a process's time that a recurring piece of work takes, however often it is triggered."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager


class DutyCycle:
    """Work, then rest in proportion. Cheap work is hardly delayed; costly work is done less often."""

    def __init__(
        self,
        *,
        share: float,
        max_rest_s: float,
        clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Bound the work of one thread.

        Args:
            share: Share of the thread's time, above 0 and at most 1.
            max_rest_s: Longest rest in seconds. Work that takes more than its share of this time exceeds the bound.
            clock: Processor time, so that a busy machine does not count as work.
            sleep: Waits the given seconds.
        """
        self._rest_per_work = 1 / share - 1
        self._max_rest_s = max_rest_s
        self._clock = clock
        self._sleep = sleep
        self._worked_s = 0.0

    @contextmanager
    def work(self) -> Iterator[None]:
        """Measure the work done in this context. Do not await in it: the work of other tasks would count."""
        started = self._clock()
        try:
            yield
        finally:
            self._worked_s += self._clock() - started

    def leave_out(self, seconds: float) -> None:
        """Count so much of the work since the last rest as none: others were waiting for just this."""
        self._worked_s -= seconds

    async def rest(self) -> None:
        """Wait until the work since the last rest is within its share."""
        worked_s, self._worked_s = self._worked_s, 0.0
        await self._sleep(min(self._max_rest_s, worked_s * self._rest_per_work))
