"""Builds the parts of supervised training, as the newest checkpoint says."""

import math
from pathlib import Path

import structlog

from penstock.errors import ConfigError, SetupError
from services.trainer.backend.ranks.start import open_supervised_ranks
from services.trainer.checkpoint.store import Checkpoint, CheckpointStore
from services.trainer.checks.schedule import schedule_contradiction, warmup_doubt
from services.trainer.config import TrainerConfig
from services.trainer.data.dataset import Dataset, open_dataset
from services.trainer.data.prompt_length import ConversationLimit
from services.trainer.data.sources.source import DEMONSTRATIONS
from services.trainer.evaluation.sets import open_sets
from services.trainer.sft.batches import BatchesAhead, BatchReader
from services.trainer.sft.config import SftConfig, SftSettings
from services.trainer.sft.loop import Observer, SftLoop
from services.trainer.sft.sequences import DemonstrationReader
from services.trainer.sft.validation import Validation
from services.trainer.starting_point import new_run_id
from services.trainer.telemetry.metrics_log import MetricsLog
from services.trainer.telemetry.trackers import TrackedRun, Trackers, described

log = structlog.get_logger()


def assemble(settings: SftSettings, folder: Path, observer: Observer) -> SftLoop:
    """Build the loop of the run in `folder`. Blocks.

    Args:
        settings: Of the run.
        folder: The run folder, which no other process uses.
        observer: Told how far the run is.

    Raises:
        UserError: the model, the data or the checkpoints are not as the run needs them.
    """
    path, sft = settings.model.path, settings.sft
    checkpoints = CheckpointStore(folder / "checkpoints", keep=settings.trainer.keep_checkpoints)
    checkpoints.claim()
    checkpoint = _resumable(checkpoints.latest())
    limit = ConversationLimit.of_model(path, max_tokens=sft.max_tokens)
    dataset = open_dataset(settings.data, seed=settings.run.seed, limit=limit, form=DEMONSTRATIONS)
    sets = open_sets(settings.evaluation, settings.data, form=DEMONSTRATIONS) if sft.validate_every else {}
    config = _with_steps(settings, dataset, checkpoint)
    if doubt := warmup_doubt(config.optimizer, num_steps=config.num_steps):
        log.warning("settings.doubtful", reason=doubt)
    arguments = {
        "model_path": path,
        "config": config,
        "seed": settings.run.seed,
        "hsdp_replicas": config.hsdp_replicas,
        "expert_parallel": config.expert_parallel,
        "sequence_parallel": config.sequence_parallel,
    }
    backend = open_supervised_ranks(arguments, num_ranks=config.ranks)
    backend.load(None if checkpoint is None else checkpoint.path)
    step = 0 if checkpoint is None else checkpoint.step
    run_id = new_run_id(settings.run.name) if checkpoint is None else str(checkpoint.state["run_id"])
    validation = None
    if sets:  # a reader of its own: training reads ahead in another thread meanwhile
        validation = Validation(sets=sets, reader=DemonstrationReader.open(path), limit=limit, backend=backend)
    log.info("run.opened", run_id=run_id, step=step, num_steps=config.num_steps, resumed=checkpoint is not None)
    return SftLoop(
        run_id=run_id,
        folder=folder,
        base_model=path,
        num_steps=config.num_steps,
        num_steps_of=_num_steps_of(sft, dataset),
        checkpoint_every=config.checkpoint_every,
        validate_every=sft.validate_every,
        step=step,
        num_samples=0 if checkpoint is None else _num_samples(checkpoint, dataset),
        num_rows=dataset.num_rows,
        num_too_long=dataset.num_passed_over(),
        batches=BatchesAhead(
            BatchReader(dataset, DemonstrationReader.open(path), batch_size=sft.batch_size, batch_unit=sft.batch_unit),
            0 if checkpoint is None else int(checkpoint.state["position"]),
        ),
        backend=backend,
        checkpoints=checkpoints,
        saved_step=None if checkpoint is None else step,
        validation=validation,
        metrics=MetricsLog(folder, last_step=step),
        validations=MetricsLog(folder, last_step=step, name="validation"),
        trackers=_open_trackers(settings, folder, run_id, step),
        observer=observer,
    )


def _resumable(checkpoint: Checkpoint | None) -> Checkpoint | None:
    if checkpoint is not None and checkpoint.state.get("kind") != "sft":
        raise SetupError(
            f"{checkpoint.path} is a checkpoint of reinforcement learning, which `penstock train --resume` continues; "
            f"to go on from its weights, begin a run with --model.path={checkpoint.model_path}"
        )
    return checkpoint


def _with_steps(settings: SftSettings, dataset: Dataset, checkpoint: Checkpoint | None) -> TrainerConfig:
    """Return the trainer's settings with the number of steps that the epochs make.

    A run that goes on keeps the number that it began with. By now more rows may be known to be wrong or too long, which
    would change the number, and the learning rate would jump. With other epochs, rows or batches, it takes the steps
    that the rest of them makes.
    """
    sft, trainer = settings.sft, settings.trainer
    if not sft.epochs:
        return trainer
    num_rows = _num_learnable(dataset)
    step, num_samples = (0, 0) if checkpoint is None else (checkpoint.step, _num_samples(checkpoint, dataset))
    num_left = max(0.0, sft.epochs * num_rows - num_samples)
    num_steps = max(1, step + math.ceil(num_left / sft.batch_size))
    if checkpoint is not None and checkpoint.state.get("num_steps_of") == _num_steps_of(sft, dataset):
        num_steps = int(checkpoint.state["num_steps"])
    if reason := schedule_contradiction(trainer.optimizer, num_steps=num_steps):
        raise ConfigError(f"sft.epochs = {sft.epochs:g} makes {num_steps} steps of {num_rows} rows: {reason}")
    return trainer.model_copy(update={"num_steps": num_steps})


def _num_learnable(dataset: Dataset) -> int:
    return dataset.num_rows - dataset.num_passed_over() - dataset.num_wrong()


def _num_samples(checkpoint: Checkpoint, dataset: Dataset) -> int:
    """Return the samples that were learned. Checkpoints of earlier releases only count rows, those passed over
    included. The share of learned rows among them is taken to be that among all rows."""
    if "num_samples" in checkpoint.state:
        return int(checkpoint.state["num_samples"])
    return round(int(checkpoint.state["position"]) * _num_learnable(dataset) / dataset.num_rows)


def _num_steps_of(sft: SftConfig, dataset: Dataset) -> list[float]:
    """Return what makes the number of steps, but for the rows that are passed over."""
    return [sft.epochs, sft.batch_size, dataset.num_rows]


def _open_trackers(settings: SftSettings, folder: Path, run_id: str, step: int) -> Trackers:
    config = settings.trackers
    run = TrackedRun(
        run_id=run_id,
        name=config.run_name or run_id,
        project=config.project,
        last_step=step,
        folder=folder / "trackers",
        settings=described(settings),
    )
    return Trackers.open(config, run)
