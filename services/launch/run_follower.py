"""Follows the files of a run while it goes on: its steps, its evaluations, and where it stands."""

import time
from collections.abc import Callable
from typing import Any, Final

from services.launch.metrics import MetricsFollower, StepRow, describe_evaluation
from services.view.summary import standing

_AGAIN_S: Final = 5.0
"""Seconds after which the run's standing is computed anew although nothing is new: it may be stuck."""


class RunFollower:
    """The steps and evaluations of a run."""

    def __init__(
        self, metrics: MetricsFollower, evaluations: MetricsFollower, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Follow these files; the present rows are old."""
        self._metrics = metrics
        self._evaluations = evaluations
        self._now = now
        self._last_step_at = now()
        self._stood_at = now()
        self._standing: dict[str, Any] = {}

    @property
    def rows(self) -> list[StepRow]:
        """All steps so far."""
        return self._metrics.rows

    def poll(self, write: Callable[[str], None]) -> list[StepRow]:
        """Read the files, write a line for each new evaluation, and return the new steps."""
        new_rows = self._metrics.poll()
        evaluated = self._evaluations.poll()
        for row in evaluated:
            write(describe_evaluation(row))
        if new_rows:
            self._last_step_at = self._now()
        if new_rows or evaluated:
            self._standing = {}
        return new_rows

    def standing(self, *, is_running: bool) -> dict[str, Any]:
        """Return where the run stands, as of a few seconds ago at most."""
        now = self._now()
        if not self._standing or self._standing["is_running"] != is_running or now - self._stood_at >= _AGAIN_S:
            silent_s = now - self._last_step_at
            self._standing = standing(self.rows, self._evaluations.rows, is_running=is_running, silent_s=silent_s)
            self._stood_at = now
        return self._standing
