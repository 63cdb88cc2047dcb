"""A training loop with a real backend, checkpoints, metrics and recordings, that learns demonstrations beside groups.

Groups come as soon as they are admitted, one after the other, and are always the same two: each has right samples and
wrong ones, so whether the policy learns from them can be measured.
"""

import asyncio
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from penstock.records import Group
from services.trainer.admission.config import FilterConfig
from services.trainer.admission.gate import Gate
from services.trainer.admission.group_state import Arrival
from services.trainer.admission.ledger import GroupLedger
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.backend.in_process import InProcessBackend
from services.trainer.batching.sequences import GroupReader, TrainSequence, open_reader
from services.trainer.checkpoint.saving import CheckpointSaver
from services.trainer.checkpoint.store import Checkpoint, CheckpointStore
from services.trainer.config import BackendConfig, OptimizerConfig, TrainerConfig
from services.trainer.demonstrations.config import DemonstrationsConfig
from services.trainer.demonstrations.opening import open_demonstrations
from services.trainer.flow.batch_source import BatchSource
from services.trainer.flow.changes import Changes
from services.trainer.flow.collector import Finished
from services.trainer.flow.crash_record import CrashRecord
from services.trainer.loop import TrainingLoop
from services.trainer.position import Position
from services.trainer.replay.recorder import StepRecorder
from services.trainer.replay.settings import StepSettings
from services.trainer.starting_point import StartingPoint
from services.trainer.telemetry.metrics_log import MetricsLog
from services.trainer.telemetry.progress import Progress
from tests.support.trainer.groups import IMAGES, make_group, picture
from tests.support.trainer.runs.gated_loop import PromptPublication
from tests.support.trainer.runs.training_loops import UNUSED, training_loop

TEMPERATURE = 0.7
REWARDS = (1.0, 0.0, 0.0, 1.0)


def group_of(model: Path, index: int, *, version: int) -> Group:
    """One of two groups, the first with a picture, under any index."""
    shown: dict[str, Any] = {"images": [picture(3)], "placeholders": [9]} if index % 2 == 0 else {}
    group = make_group(model, index=index % 2, rewards=REWARDS, version=version, **shown)
    return msgspec.structs.replace(group, id=msgspec.structs.replace(group.id, index=index))


def samples_of(model: Path, *, reward: float) -> list[TrainSequence]:
    """The samples of both groups that have this reward."""
    reader = open_reader(model)
    groups = [reader.read(group_of(model, index, version=1), IMAGES) for index in (0, 1)]
    return [sequence for group in groups for sequence in np.array(group.sequences)[np.array(REWARDS) == reward]]


class _Loop(TrainingLoop):
    """Without engines: nothing is copied for them, and no sample is shown."""

    async def _copy_weights(self) -> Any:
        return SimpleNamespace(version=self.position.version)

    def _describe(self, batch: Any) -> dict[str, Any]:
        return {}


class _Trackers:
    """None."""

    def log(self, row: dict[str, Any]) -> None:
        """Show nobody."""


class _Publication(PromptPublication):
    """Of the only trainer."""

    class lock:  # noqa: N801 - as the loop calls it
        """Is never lost."""

        @staticmethod
        async def confirm() -> None:
            """It is held."""

    async def announce_checkpoint(self) -> None:
        """Nobody listens."""


class _Feeder:
    """Plays groups itself: each call brings one."""

    num_unsent = 0

    def __init__(self, model: Path, ledger: GroupLedger[Any, Any], position: Position, changes: Changes) -> None:
        self._model = model
        self._reader: GroupReader = open_reader(model)
        self._ledger = ledger
        self._position = position
        self._changes = changes
        self._admitted: deque[int] = deque()

    def wake(self) -> None:
        """Admit what the gate allows, and finish one group."""
        ledger, position = self._ledger, self._position
        while ledger.num_admissible(position.num_steps_left, num_steps_ahead=position.num_steps_ahead):
            self._admitted.append(ledger.admit(position.version).index)
        if self._admitted:
            index = self._admitted.popleft()
            played = group_of(self._model, index, version=position.version)
            ready = self._reader.read(played, IMAGES)
            images = {sha256: IMAGES[sha256] for sha256 in played.images}
            arrival = Arrival(
                index=index,
                attempt=0,
                oldest_version=position.version,
                newest_version=position.version,
                num_tokens=1,
                group=Finished(played=played, images=images, ready=ready),
            )
            assert self._ledger.hold(arrival)
            self._changes.notify()


def train(
    model: Path,
    folder: Path,
    demonstrations: DemonstrationsConfig | None,
    *,
    num_steps: int = 6,
    seed: int = 0,
    checkpoint: Checkpoint | None = None,
    records: bool = False,
    algorithm: AlgorithmConfig | None = None,
) -> list[dict[str, Any]]:
    """Train to the end, from the model or a checkpoint, with a checkpoint every two steps; return the metrics' rows."""
    algorithm = algorithm or AlgorithmConfig()
    return asyncio.run(_train(model, folder, demonstrations, num_steps, seed, checkpoint, algorithm, records=records))


async def _train(
    model: Path,
    folder: Path,
    demonstrations: DemonstrationsConfig | None,
    num_steps: int,
    seed: int,
    checkpoint: Checkpoint | None,
    algorithm: AlgorithmConfig,
    *,
    records: bool,
) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=2)
    config = TrainerConfig(
        device="cpu", num_steps=num_steps, groups_per_step=2, max_staleness=0, checkpoint_every=2, optimizer=optimizer
    )
    own = BackendConfig(**{name: getattr(config, name) for name in BackendConfig.model_fields})
    coef = None if demonstrations is None else demonstrations.coef
    backend = InProcessBackend(model, own, algorithm, seed=seed, temperature=TEMPERATURE, demonstration_coef=coef)
    backend.load(None if checkpoint is None else checkpoint.path)
    gate = Gate(max_staleness=0, groups_per_step=2)
    ledger: GroupLedger[Any, Any] = (
        GroupLedger(gate) if checkpoint is None else GroupLedger.from_state(checkpoint.state["ledger"], gate)
    )
    store = CheckpointStore(folder / "checkpoints", keep=99)
    start = StartingPoint(run_id="run", folder=folder, checkpoints=store, checkpoint=checkpoint, versions=UNUSED)
    version = start.version or 1
    position = Position(num_steps=num_steps, step=start.step, version=version, announced_version=version)
    changes, publication = Changes(), _Publication(position)
    progress = Progress(run_id="run", num_steps=num_steps)
    ahead = None
    if demonstrations is not None:
        ahead = open_demonstrations(demonstrations, model, seed=seed, position=start.demonstration_position)
    settings = StepSettings.of(
        model_path=model,
        seed=seed,
        temperature=TEMPERATURE,
        trainer=config,
        algorithm=algorithm,
        filters=FilterConfig(),
        demonstrations=demonstrations,
    )
    feeder: Any = _Feeder(model, ledger, position, changes)
    lock: Any = publication.lock
    any_publication: Any = publication
    loop = training_loop(
        folder,
        batches=BatchSource(
            ledger=ledger,
            feeder=feeder,
            collector=UNUSED,
            changes=changes,
            position=position,
            streak=UNUSED,
            streams=True,
        ),
        backend=backend,
        crashes=CrashRecord(folder / "in_hand.json", run_id="run", is_resumed=checkpoint is not None),
        checkpoints=CheckpointSaver(
            store=store,
            base_model=model,
            backend=backend,
            ledger=ledger,
            pools=None,
            lock=lock,
            images=UNUSED,
            publication=any_publication,
            progress=progress,
            saved_version=start.version,
            demonstrations=ahead,
        ),
        publication=publication,
        publisher=SimpleNamespace(num_live_replicas=1),
        metrics=MetricsLog(folder, last_step=start.step),
        trackers=_Trackers(),
        recorder=StepRecorder(folder, settings, backend, run_id="run") if records else None,
        demonstrations=ahead,
        loop_type=_Loop,
        checkpoint_every=2,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            await loop._train_until(asyncio.Event(), tasks)
    finally:
        if ahead is not None:
            await ahead.close()
    return loop.metrics.rows()
