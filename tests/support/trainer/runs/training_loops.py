"""A training loop without replicas, metrics and trackers."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.trainer.config import TrainerConfig
from services.trainer.flow.batch_source import BatchSource
from services.trainer.flow.crash_record import CrashRecord
from services.trainer.loop import TrainingLoop
from services.trainer.step_computation import StepComputation
from services.trainer.telemetry.progress import Progress
from services.trainer.telemetry.trace import TrainerTrace

UNUSED: Any = None
"""In place of parts that nobody asks."""


def training_loop(
    folder: Path,
    *,
    batches: BatchSource,
    backend: Any,
    crashes: CrashRecord,
    checkpoints: Any = UNUSED,
    evaluator: Any = None,
    publication: Any = UNUSED,
    publisher: Any = UNUSED,
    metrics: Any = UNUSED,
    trackers: Any = UNUSED,
    recorder: Any = None,
    demonstrations: Any = None,
    now: Callable[[], float] = time.monotonic,
    loop_type: type[TrainingLoop] = TrainingLoop,
    **settings: Any,
) -> TrainingLoop:
    """A loop that trains what `batches` gives, with the parts that these come from; `settings` are the trainer's."""
    return loop_type(
        config=TrainerConfig(**settings),
        folder=folder,
        progress=Progress(run_id="run", num_steps=batches.position.num_steps),
        position=batches.position,
        backend=backend,
        computation=StepComputation(backend=backend, crashes=crashes, recorder=recorder),
        publisher=publisher,
        publication=publication,
        ledger=batches.ledger,
        feeder=batches.feeder,
        collector=batches.collector,
        batches=batches,
        checkpoints=checkpoints,
        metrics=metrics,
        trace=TrainerTrace(folder, last_step=0),
        trackers=trackers,
        evaluator=evaluator,
        demonstrations=demonstrations,
        now=now,
    )
