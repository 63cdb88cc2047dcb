"""Counts groups that fail or get lost without a valid one in between; beyond a bound, it ends the run with the reason.

The same bound holds for deaths of the trainer over its groups (`CrashRecord.require_progress`).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from penstock.errors import DataError

MAX_IN_A_ROW: Final = 32
"""More than any bad stretch of a data set; a mistake in data or setup fails every group and gets here in minutes."""


@dataclass(slots=True, kw_only=True)
class FailureStreak:
    """Failures and losses since the last valid group."""

    max_in_a_row: int = MAX_IN_A_ROW
    _num_failed: int = 0
    _num_lost: Counter[int] = field(default_factory=Counter)

    def end(self) -> None:
        """End the streak, because a valid group arrived."""
        self._num_failed = 0
        self._num_lost.clear()

    def fail(self, index: int, reason: str) -> None:
        """Count a group that could not be played, judged or read.

        Raises:
            DataError: too many groups failed in a row.
        """
        self._num_failed += 1
        if self._num_failed > self.max_in_a_row:
            raise DataError(
                f"{self._num_failed} groups in a row failed, more than {self.max_in_a_row}; "
                f"the last one, number {index}: {reason}"
            )

    def lose(self, indices: Iterable[int], reason: str) -> None:
        """Count groups that were lost and are admitted again.

        Losses are counted per group, because a server that loses its store loses all groups at once, each of them once.

        Raises:
            DataError: one of them was lost too often.
        """
        self._num_lost.update(indices)
        for index, count in self._num_lost.items():
            if count > self.max_in_a_row:
                raise DataError(
                    f"group {index} was lost {count} times with no sound group in between, more than "
                    f"{self.max_in_a_row}: {reason}; see that the NATS server keeps "
                    "what it stores, and that nothing else takes messages of this run"
                )
