"""The clock of one episode."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from penstock.errors import DeadlineError

TIME_REMEDY = "see worker.episode_timeout_s and data.limits.episode_timeout_s"
"""Ends the message that an episode's time is over."""


class EpisodeClock:
    """When an episode began, and the time that it has left, which is paused while it waits for a replica or a verdict.

    The wall clock is read once, so that the times of an episode's turns fit its durations.
    """

    def __init__(self, limit_s: float) -> None:
        """Start with `limit_s` seconds left."""
        self._started = time.monotonic()
        self._ends_at = self._started + limit_s
        self.started_at = time.time()
        """Start time in seconds since 1970."""
        self._limit: asyncio.Timeout | None = None
        self._num_pauses = 0
        self._paused_at = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, pauses included."""
        return time.monotonic() - self._started

    @property
    def now(self) -> float:
        """The present time in seconds since 1970."""
        return self.started_at + self.elapsed_s

    @property
    def remaining_s(self) -> float:
        """Seconds that are left."""
        return self._ends_at - time.monotonic()

    def stop_for(self, seconds: float) -> None:
        """Do not count these seconds, which have passed."""
        self._ends_at += seconds

    @contextmanager
    def measured(self, note: Callable[[float], None]) -> Iterator[None]:
        """Pass the seconds of the context to `note`, however it ends."""
        began_s = self.elapsed_s
        try:
            yield
        finally:
            note(self.elapsed_s - began_s)

    @asynccontextmanager
    async def limit(self, what: str) -> AsyncIterator[None]:
        """Bound the context by the time left.

        Raises:
            DeadlineError: `what` took longer than the episode has.
        """
        limit = self._limit = asyncio.timeout(self.remaining_s)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineError(f"{what} took longer than the episode has; {TIME_REMEDY}") from None
        finally:
            self._limit = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the clock; pauses may overlap."""
        if self._num_pauses == 0:
            self._paused_at = time.monotonic()
            self._reschedule(None)
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1
            if self._num_pauses == 0:
                self.stop_for(time.monotonic() - self._paused_at)
                self._reschedule(asyncio.get_running_loop().time() + self.remaining_s)

    def _reschedule(self, when: float | None) -> None:
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(when)
