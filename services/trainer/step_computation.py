"""Computes an optimizer step of groups on the backend, and keeps what must be known of it: the recording that
`penstock replay` computes again, and the groups in hand, should the process die of them. All methods block.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.errors import DataError
from services.trainer.backend.base import TrainBackend
from services.trainer.flow.collector import Finished
from services.trainer.flow.crash_record import CrashRecord
from services.trainer.replay.recorder import StepRecorder
from services.trainer.sft.batches import SftBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComputation:
    """One step at a time: `begin`, `accumulate` for each chunk, then `finish`, or `abort`."""

    backend: TrainBackend
    crashes: CrashRecord
    recorder: StepRecorder | None
    """Keeps what `penstock replay` needs; None where trainer.record_groups is off."""

    @property
    def is_recorded(self) -> bool:
        """Whether steps are written to the run's folder."""
        return self.recorder is not None

    def begin(self, step: int, version: int) -> None:
        """Begin step `step`, of the weights of `version`."""
        self.backend.begin_step(version)
        if self.recorder is not None:
            self.recorder.begin(step, version)

    def accumulate(self, chunk: Sequence[Finished]) -> None:
        """Compute the gradient of some of the step's groups.

        Raises:
            DataError: the algorithm refuses them.
        """
        if self.recorder is not None:
            images = {sha256: data for finished in chunk for sha256, data in finished.images.items()}
            self.recorder.add([finished.played for finished in chunk], images)
        with self._recorded_if_wrong(), self.crashes.training([finished.ready.index for finished in chunk]):
            self.backend.accumulate([finished.ready for finished in chunk])

    def abort(self) -> None:
        """Forget the step, as if it had not begun."""
        self.backend.abort_step()
        if self.recorder is not None:
            self.recorder.abort()

    def finish(self, batch: Sequence[Finished], learned: SftBatch | None) -> Callable[[], dict[str, Any]]:
        """Update the weights; return what computes the step's metrics.

        Args:
            batch: All groups of the step.
            learned: Demonstrations that it learns beside them.

        Raises:
            DataError: the algorithm refuses the batch.
        """
        if self.recorder is not None and learned is not None:
            self.recorder.add_demonstrations(learned.rendered)
        with self._recorded_if_wrong(), self.crashes.updating([finished.ready.index for finished in batch]):
            if learned is not None:
                self.backend.add_demonstrations(learned.sequences)
            measure = self.backend.finish_step()
        digest = {} if self.recorder is None else {"weights_digest": self.backend.digests().weights}
        return lambda: measure() | digest

    @contextmanager
    def _recorded_if_wrong(self) -> Iterator[None]:
        """Keep the step's recording if it fails during the context; a step that is stopped leaves none."""
        try:
            yield
        except DataError:
            if self.recorder is not None:
                self.recorder.keep()
            raise
