"""Follows the files of a run while it goes on: its steps, its evaluations, and where it stands."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from services.launch.metrics import MetricsFollower, StepRow, describe_evaluation
from services.view.evaluating import answered_at
from services.view.summary import status_of

_AGAIN_S: Final = 5.0
"""Seconds after which the run's status is computed anew although nothing is new: it may be stuck."""


class RunFollower:
    """The steps and evaluations of a run."""

    def __init__(
        self,
        folder: Path,
        metrics: MetricsFollower,
        evaluations: MetricsFollower,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Follow these files of the run folder `folder`; the present rows are old."""
        self._folder = folder
        self._metrics = metrics
        self._evaluations = evaluations
        self._now = now
        self._num_old = len(metrics.rows)
        self._heard_at = now()
        self._answered_at: float | None = None
        """When the last answer of a running evaluation was written, by the wall clock."""
        self._status_at = now()
        self._status: dict[str, Any] = {}

    @property
    def rows(self) -> list[StepRow]:
        """All steps so far."""
        return self._metrics.rows

    def poll(self, write: Callable[[str], None]) -> list[StepRow]:
        """Read the files, write a line for each new evaluation, and return the new steps."""
        num_known = len(self.rows)
        new_rows = self._metrics.poll()
        if len(self.rows) < num_known + len(new_rows):  # the trainer has begun again at a checkpoint before some
            self._num_old = len(self.rows) - len(new_rows)
        evaluated = self._evaluations.poll()
        for row in evaluated:
            write(describe_evaluation(row))
        if new_rows or evaluated:
            self._heard_at = self._now()
            self._status = {}
        return new_rows

    def status(self, *, is_running: bool) -> dict[str, Any]:
        """Return where the run stands, as of a few seconds ago at most."""
        now = self._now()
        if not self._status or self._status["is_running"] != is_running or now - self._status_at >= _AGAIN_S:
            answered = answered_at(self._folder, self.rows, self._evaluations.rows) if is_running else None
            if answered is not None and answered != self._answered_at:
                self._heard_at = now
            self._answered_at = answered
            self._status = status_of(
                self.rows,
                self._evaluations.rows,
                is_running=is_running,
                silent_s=now - self._heard_at,
                is_evaluating=answered is not None,
                has_stepped=len(self.rows) > self._num_old,
            )
            self._status_at = now
        return self._status
