"""The loop of supervised training: read a batch, take a step, and now and then validate and save.

The next batch is read while a step is computed. Invariants: a checkpoint's weights, step and position in the data are
of one moment; a run that was killed and resumed goes on with the batch that an unbroken one would take.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from penstock.errors import DataError
from penstock.runtime.process import completed
from services.trainer.backend.base import SupervisedBackend
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.sft.batches import BatchesAhead
from services.trainer.sft.validation import Validation
from services.trainer.telemetry.field_names import field_names
from services.trainer.telemetry.metrics_log import MetricsLog
from services.trainer.telemetry.trackers import Trackers

log = structlog.get_logger()

Row = dict[str, Any]


class Observer:
    """Is told, in the event loop's thread, how far a run is. This one shows nothing."""

    def opened(self, *, num_rows: int, num_too_long: int, step: int, num_steps: int) -> None:
        """The model is loaded, and the first rows have been read.

        Args:
            num_rows: Of an epoch.
            num_too_long: Those of them that are known to be passed over.
            step: Optimizer steps taken.
            num_steps: Of the whole run.
        """

    def trained(self, row: Row) -> None:
        """A step was taken: its row of metrics.jsonl."""

    def validated(self, row: Row) -> None:
        """The loss was measured: the row of validation.jsonl."""

    def ended(self, *, is_complete: bool) -> None:
        """All is saved.

        Args:
            is_complete: Whether all steps are taken, and the last one's loss is measured.
        """


@dataclass(slots=True, kw_only=True)
class SftLoop:
    """A run from its current step to its last."""

    run_id: str
    folder: Path
    base_model: Path
    """Folder of the model that the run began with; every checkpoint names it."""
    num_steps: int
    num_steps_of: list[float]
    """What made it; every checkpoint has both."""
    checkpoint_every: int
    validate_every: int
    """Steps; 0 never validates."""
    step: int
    """Optimizer steps taken."""
    num_samples: int
    """Samples learned in them."""
    num_rows: int
    """Rows of an epoch."""
    num_too_long: int
    """Those of them that are known to be passed over."""
    batches: BatchesAhead
    backend: SupervisedBackend
    checkpoints: CheckpointStore
    saved_step: int | None
    """Step of the newest checkpoint; None in a new run."""
    validation: Validation | None
    metrics: MetricsLog
    validations: MetricsLog
    trackers: Trackers
    observer: Observer

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the last step or until `stop`, and save a checkpoint at the end in both cases.

        The caller closes `batches`.

        Raises:
            DataError: a row is wrong; the steps before its batch are saved.
        """
        self.observer.opened(
            num_rows=self.num_rows, num_too_long=self.num_too_long, step=self.step, num_steps=self.num_steps
        )
        try:
            await self._validate(stop)
            while self.step < self.num_steps and not stop.is_set():
                started = time.monotonic()
                batch = await self.batches.take(is_last=self.step + 1 == self.num_steps)
                data_wait_s = time.monotonic() - started
                metrics = await asyncio.to_thread(self.backend.step, batch.sequences)
                self.step += 1
                self.num_samples += len(batch.sequences)
                self.batches.learned(batch)
                metrics |= {"data_wait_s": data_wait_s, "num_passed_over_samples": float(batch.num_passed_over)}
                await completed(self._report(metrics, step_s=time.monotonic() - started))
                if self.step % self.checkpoint_every == 0:
                    await asyncio.to_thread(self._save)
                await self._validate(stop)
        except DataError:
            await asyncio.to_thread(self._save_if_new)
            raise
        await asyncio.to_thread(self._save_if_new)
        for log in (self.metrics, self.validations):
            await asyncio.to_thread(log.end)
        is_measured = self.validation is None or not self._is_validation_due()
        self.observer.ended(is_complete=self.step >= self.num_steps and is_measured)

    async def _report(self, metrics: Row, *, step_s: float) -> None:
        row = {
            "step": self.step,
            "num_steps": self.num_steps,
            "epoch": self.batches.epoch,
            **metrics,
            "train_s": metrics["step_time_s"],
            "step_s": step_s,
        }
        row |= field_names(row)
        await asyncio.to_thread(self.metrics.write, row)
        self.trackers.log(row)
        self.observer.trained(row)

    async def _validate(self, stop: asyncio.Event) -> None:
        """Measure the validation loss if it is due and not known; one that is stopped is measured after a resume."""
        if self.validation is None or not self._is_validation_due():
            return
        found = await asyncio.to_thread(self.validation.measure, stop.is_set, self.validations.note_progress)
        if found is None:
            return
        row = {"step": self.step, **found}
        await asyncio.to_thread(self.validations.write, row)
        self.trackers.log(row)
        self.observer.validated(row)

    def _is_validation_due(self) -> bool:
        is_wanted = self.step % self.validate_every == 0 or self.step == self.num_steps
        return is_wanted and self.step not in [row["step"] for row in self.validations.rows()]

    def _save_if_new(self) -> None:
        if self.step and self.saved_step != self.step:
            self._save()

    def _save(self) -> None:
        started = time.monotonic()
        state = {
            "kind": "sft",
            "run_id": self.run_id,
            "step": self.step,
            "position": self.batches.position,
            "num_samples": self.num_samples,
            "num_steps": self.num_steps,
            "num_steps_of": self.num_steps_of,
            "base_model": str(self.base_model),
        }
        checkpoint = self.checkpoints.save(self.step, state, self.backend.save)
        self.saved_step = self.step
        log.info(
            "checkpoint.saved",
            step=self.step,
            path=str(checkpoint.path),
            elapsed_s=round(time.monotonic() - started, 3),
        )
