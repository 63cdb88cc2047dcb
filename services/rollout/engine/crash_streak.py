"""Counts calls that crashed with no token of any call in between; beyond a bound, the engine is of no use.

A crash is an unexpected error: a bug, or a SGLang whose processes live but no longer answer as they
should. A new process may heal that, and if not, the run's supervisor ends the run with the reason.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from penstock.errors import PenstockError, UnavailableError

log = structlog.get_logger()

MAX_IN_A_ROW = 8
"""More crashes than one odd prompt causes before routers pause."""
MIN_S = 20.0
"""A router offers a failing replica eight calls in a moment, so their number alone does not tell that it lasts."""


class CrashStreak:
    """Crashes since the engine last answered."""

    def __init__(
        self,
        *,
        max_in_a_row: int = MAX_IN_A_ROW,
        min_s: float = MIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Call the engine useless after `max_in_a_row` crashes that span at least `min_s` seconds of `clock`."""
        self._max_in_a_row = max_in_a_row
        self._min_s = min_s
        self._clock = clock
        self._num_crashes = 0
        self._began_at = 0.0
        self._last = ""
        self.is_useless = asyncio.Event()

    def note_answer(self) -> None:
        """End the streak: a call got tokens."""
        self._num_crashes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the call that runs in this context, if it crashes."""
        try:
            yield
        except (PenstockError, TimeoutError):
            raise
        except Exception as error:
            self._count(error)
            raise

    def require_useful(self) -> None:
        """Raise if the engine is useless.

        Raises:
            UnavailableError: it is; the text holds the last crash.
        """
        if self.is_useless.is_set():
            raise UnavailableError(
                f"the engine crashed in {self._num_crashes} calls over {self._clock() - self._began_at:.0f} s and "
                f"answered none; the last: {self._last}; start the engine again"
            )

    def _count(self, error: Exception) -> None:
        now = self._clock()
        if self._num_crashes == 0:
            self._began_at = now
        self._num_crashes += 1
        self._last = f"{type(error).__name__}: {error}"
        is_useless = self._num_crashes >= self._max_in_a_row and now - self._began_at >= self._min_s
        if is_useless and not self.is_useless.is_set():
            log.error("engine.useless", num_crashes=self._num_crashes, last=self._last)
            self.is_useless.set()
