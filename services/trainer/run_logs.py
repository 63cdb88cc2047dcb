"""What a run keeps of its steps, in its folder and with trackers."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from penstock.model.tokens import image_token_id
from services.trainer.backend.base import TrainBackend
from services.trainer.config import TrainerSettings
from services.trainer.data.dataset import Dataset
from services.trainer.position import Position
from services.trainer.replay.recorder import StepRecorder
from services.trainer.replay.settings import StepSettings
from services.trainer.starting_point import StartingPoint
from services.trainer.telemetry.episodes.log import EpisodeLog
from services.trainer.telemetry.episodes.token_names import token_names
from services.trainer.telemetry.metrics_log import MetricsLog
from services.trainer.telemetry.trace import TrainerTrace
from services.trainer.telemetry.trackers import TrackedRun, Trackers, described


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLogs:
    """The logs of a run, open for writing."""

    metrics: MetricsLog
    trace: TrainerTrace
    trackers: Trackers
    episodes: EpisodeLog | None
    """Groups for people to read; None where episodes.keep is off."""
    recorder: StepRecorder | None
    """What `penstock replay` needs; None where trainer.record_groups is off."""


async def open_run_logs(
    settings: TrainerSettings,
    start: StartingPoint,
    position: Position,
    dataset: Dataset,
    backend: TrainBackend,
    stack: AsyncExitStack,
) -> RunLogs:
    """Open the logs where the run goes on: what they have of later steps, or of another run, is put aside.

    Raises:
        UserError: a tracker cannot be opened.
    """
    episodes = None
    if settings.episodes.keep != "off":
        episodes = await asyncio.to_thread(_open_episodes, settings, start, position, dataset)
        stack.push_async_callback(asyncio.to_thread, episodes.close)
    trackers = await asyncio.to_thread(_open_trackers, settings, start)
    stack.push_async_callback(asyncio.to_thread, trackers.close)
    metrics = await asyncio.to_thread(MetricsLog, start.folder, last_step=start.step, last_row=start.metrics)
    if metrics.restored is not None:  # the trainer died before it sent them the row, too
        trackers.log(metrics.restored)
    return RunLogs(
        metrics=metrics,
        trace=await asyncio.to_thread(TrainerTrace, start.folder, last_step=start.step),
        trackers=trackers,
        episodes=episodes,
        recorder=_make_recorder(settings, start, backend) if settings.trainer.record_groups else None,
    )


def _open_episodes(settings: TrainerSettings, start: StartingPoint, position: Position, dataset: Dataset) -> EpisodeLog:
    return EpisodeLog(
        start.folder,
        settings.episodes,
        position,
        dataset=dataset,
        names=token_names(settings.model.path),
        image_token_id=image_token_id(settings.model.path),
        is_resumed=start.checkpoint is not None,
    )


def _open_trackers(settings: TrainerSettings, start: StartingPoint) -> Trackers:
    config = settings.trackers
    run = TrackedRun(
        run_id=start.run_id,
        name=config.run_name or start.run_id,
        project=config.project,
        last_step=start.step,
        folder=start.folder / "trackers",
        settings=described(settings),
    )
    return Trackers.open(config, run)


def _make_recorder(settings: TrainerSettings, start: StartingPoint, backend: TrainBackend) -> StepRecorder:
    recorded = StepSettings.of(
        model_path=settings.model.path,
        seed=settings.run.seed,
        temperature=settings.sampling.temperature,
        trainer=settings.trainer,
        algorithm=settings.algorithm,
        filters=settings.filters,
        demonstrations=settings.demonstrations,
    )
    return StepRecorder(start.folder, recorded, backend, run_id=start.run_id)
