"""Builds the parts of a run, each from its own section of the settings, as the newest checkpoint says."""

import asyncio
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import structlog

from penstock.bus.buckets.lock import Lock
from penstock.bus.buckets.watch import Watch, watched
from penstock.bus.connection import Bus
from penstock.bus.image_store import ImageStore
from penstock.bus.work_queue.consumer import Consumer, Delivery, consuming
from penstock.records import Sampling
from penstock.runtime.security import Security
from penstock.telemetry.metrics import exposed
from penstock.weights import nccl
from services.trainer.admission.config import doubts
from services.trainer.admission.gate import Gate
from services.trainer.admission.ledger import GroupLedger
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.statistics import whole_batch_setting
from services.trainer.backend.base import TrainBackend
from services.trainer.backend.ranks.start import follow_torchrun, is_follower, open_ranks
from services.trainer.batching.sequences import open_reader
from services.trainer.checkpoint.saving import CheckpointSaver
from services.trainer.checkpoint.store import Checkpoint
from services.trainer.checks.answer_length import most_own_tokens, penalty_doubt
from services.trainer.checks.schedule import warmup_doubt
from services.trainer.config import TrainerConfig, TrainerSettings, WeightSyncConfig
from services.trainer.evaluation.evaluator import Evaluator
from services.trainer.evaluation.holding import ReplicaHolding, give_up_interrupted
from services.trainer.evaluation.sets import EvaluationSet
from services.trainer.flow.batch_source import BatchSource
from services.trainer.flow.changes import Changes
from services.trainer.flow.collector import Collector, Finished
from services.trainer.flow.crash_record import CrashRecord
from services.trainer.flow.failure_streak import MAX_IN_A_ROW, FailureStreak
from services.trainer.flow.feeder import Feeder
from services.trainer.flow.filter_tally import FilterTally
from services.trainer.inputs import open_demonstration_batches, open_evaluation_sets, open_pools, open_prompts
from services.trainer.loop import TrainingLoop
from services.trainer.position import Position
from services.trainer.publication import Publication
from services.trainer.run_logs import RunLogs, open_run_logs
from services.trainer.starting_point import StartingPoint
from services.trainer.step_computation import StepComputation
from services.trainer.telemetry.progress import Progress
from services.trainer.telemetry.prometheus import TrainerMetrics
from services.trainer.versions import first_version, newest_version_held
from services.trainer.weight_sync.held_out.record import open_held_out_record
from services.trainer.weight_sync.publisher import WeightPublisher
from services.trainer.weight_sync.transports.disk import WeightFileStore

log = structlog.get_logger()

_GROUP_ACK_WAIT_S = 60.0
"""A group lost on its way from the bus is delivered again after this time. Heartbeats keep those in hand."""

OpenBackend: TypeAlias = Callable[[TrainerSettings], TrainBackend]
"""Makes what computes; `load` is still to be called."""


def on_ranks(settings: TrainerSettings) -> TrainBackend:
    """Return the backend that computes in the trainer's own process, or on all of its ranks. Blocks.

    Raises:
        ConfigError: a device or a function of the algorithm is not there, or torchrun has started other ranks.
    """
    return open_ranks(_backend_arguments(settings), num_ranks=settings.trainer.ranks)


def followed(settings: TrainerSettings) -> bool:
    """Follow rank 0 to its end, if torchrun has started this process as another rank; return whether it has. Blocks.

    Raises:
        ConfigError: a device is not there, or the recipe asks for another number of ranks.
    """
    if not is_follower():
        return False
    follow_torchrun(_backend_arguments(settings), num_ranks=settings.trainer.ranks)
    return True


def _backend_arguments(settings: TrainerSettings) -> dict[str, Any]:
    """Return those of `InProcessBackend`."""
    return {
        "model_path": settings.model.path,
        "config": settings.trainer,
        "algorithm": settings.algorithm,
        "seed": settings.run.seed,
        "temperature": settings.sampling.temperature,
        "demonstration_coef": None if settings.demonstrations is None else settings.demonstrations.coef,
        "hsdp_replicas": settings.trainer.hsdp_replicas,
        "expert_parallel": settings.trainer.expert_parallel,
        "sequence_parallel": settings.trainer.sequence_parallel,
    }


async def assemble(
    settings: TrainerSettings,
    start: StartingPoint,
    bus: Bus,
    lock: Lock,
    progress: Progress,
    security: Security,
    stack: AsyncExitStack,
    *,
    open_backend: OpenBackend,
) -> TrainingLoop:
    """Build the training loop around the backend that `open_backend` makes; what must be closed is pushed on `stack`.

    Raises:
        UserError: the model, the data or NATS are not as the run needs them, or the trainer died too often in a row.
    """
    config = settings.trainer
    crashes = await asyncio.to_thread(_open_crash_record, start)
    streak = FailureStreak()
    ledger = _open_ledger(config, start.checkpoint)
    tally = FilterTally(max_share=settings.filters.max_filtered_share)
    for doubt in _doubts(settings):
        log.warning("settings.doubtful", reason=doubt)
    dataset = await asyncio.to_thread(open_prompts, settings)
    evaluated = await asyncio.to_thread(open_evaluation_sets, settings)
    demonstrations = await asyncio.to_thread(open_demonstration_batches, settings, start)
    pools = open_pools(settings, dataset, start.checkpoint, next_position=ledger.next_index)
    backend = await asyncio.to_thread(open_backend, settings)
    stack.push_async_callback(asyncio.to_thread, backend.close)
    await asyncio.to_thread(backend.load, None if start.checkpoint is None else start.checkpoint.path)
    reader = await asyncio.to_thread(open_reader, settings.model.path)
    progress.step = progress.checkpoint_step = start.step
    replicas = await _watch_replicas(settings, bus, stack)
    position = _first_position(config, start, replicas)
    changes = Changes()

    images = ImageStore(bus)
    await images.ensure()
    await lock.confirm()  # loading took long; what a new run empties may be a successor's by now
    if start.checkpoint is None:
        await images.clear()
    logs = await open_run_logs(settings, start, position, dataset, backend, stack)
    trainer_epoch = uuid.uuid4().hex[:8]
    publisher = _publisher(
        config.weight_sync,
        start.folder,
        replicas,
        security,
        host=settings.network.advertised,
        has_gpu=backend.config.device == "cuda",
        keeps_on_host=backend.environment().num_ranks > 1 or config.optimizer.offload,
    )
    stack.push_async_callback(publisher.close)
    evaluator = await _open_evaluator(settings, start, evaluated, publisher, logs, bus, images, epoch=trainer_epoch)
    consumer = await _open_groups(bus, stack, fresh_run=start.checkpoint is None)
    collector = Collector(
        consumer=consumer,
        ledger=ledger,
        changes=changes,
        reader=reader,
        images=images,
        lock=lock,
        run_id=start.run_id,
        trainer_epoch=trainer_epoch,
        streak=streak,
        crashes=crashes,
        filters=settings.filters,
        tally=tally,
        temperature=settings.sampling.temperature,
        evaluator=evaluator,
        pools=pools,
        episodes=logs.episodes,
    )
    feeder = Feeder(
        dataset=dataset,
        ledger=ledger,
        position=position,
        changes=changes,
        tally=tally,
        bus=bus,
        images=images,
        sampling=Sampling(
            temperature=settings.sampling.temperature,
            top_p=settings.sampling.top_p,
            top_k=max(0, settings.sampling.top_k),
            max_new_tokens=settings.sampling.max_new_tokens,
        ),
        run_id=start.run_id,
        trainer_epoch=trainer_epoch,
        samples_per_group=config.samples_per_group,
        pools=pools,
    )
    stack.push_async_callback(asyncio.to_thread, feeder.close)
    collector.on_received = feeder.wake
    publication = Publication(
        position=position,
        max_staleness=config.max_staleness,
        lock=lock,
        versions=start.versions,
        publisher=publisher,
        feeder=feeder,
        progress=progress,
        checkpoints_folder=start.checkpoints.folder,
    )
    log.info(
        "run.opened",
        run_id=start.run_id,
        step=start.step,
        version=position.version,
        resumed=start.version is not None,
    )
    measured = TrainerMetrics(progress=progress, ledger=ledger, feeder=feeder, folder=start.folder)
    stack.enter_context(exposed(measured.read))
    return TrainingLoop(
        config=config,
        folder=start.folder,
        progress=progress,
        position=position,
        backend=backend,
        computation=StepComputation(backend=backend, crashes=crashes, recorder=logs.recorder),
        publisher=publisher,
        publication=publication,
        ledger=ledger,
        feeder=feeder,
        collector=collector,
        batches=BatchSource(
            ledger=ledger,
            feeder=feeder,
            collector=collector,
            changes=changes,
            position=position,
            streak=streak,
            streams=_streams(config, settings.algorithm),
            pass_tokens=config.micro_batch_tokens,
            pads_passes=config.fixed_rows and config.row_lengths == 1,
            episodes=logs.episodes,
        ),
        checkpoints=CheckpointSaver(
            store=start.checkpoints,
            base_model=settings.model.path,
            backend=backend,
            ledger=ledger,
            pools=pools,
            lock=lock,
            images=images,
            publication=publication,
            progress=progress,
            saved_version=start.version,
            demonstrations=demonstrations,
        ),
        metrics=logs.metrics,
        trace=logs.trace,
        trackers=logs.trackers,
        on_step=measured.observe,
        evaluator=evaluator,
        demonstrations=demonstrations,
        episodes=logs.episodes,
    )


def _first_position(config: TrainerConfig, start: StartingPoint, replicas: Watch) -> Position:
    return Position(
        num_steps=config.num_steps,
        step=start.step,
        version=first_version(
            checkpoint=start.version,
            published=start.versions.newest_published,
            claimed=start.versions.newest_claimed,
            newest_held=newest_version_held(replicas),
            max_staleness=config.max_staleness,
        ),
    )


def _open_crash_record(start: StartingPoint) -> CrashRecord:
    start.folder.mkdir(parents=True, exist_ok=True)
    crashes = CrashRecord(start.folder / "in_hand.json", run_id=start.run_id, is_resumed=start.checkpoint is not None)
    crashes.require_progress(MAX_IN_A_ROW)
    return crashes


async def _watch_replicas(settings: TrainerSettings, bus: Bus, stack: AsyncExitStack) -> Watch:
    ttl_s = settings.bus.lease_ttl_s
    return await stack.enter_async_context(watched(await bus.bucket("replicas", ttl_s=ttl_s), ttl_s=ttl_s))


def _doubts(settings: TrainerSettings) -> list[str]:
    """Return warnings about settings that work together, but perhaps not as they are meant."""
    most = most_own_tokens(settings.data, settings.sampling, context_length=settings.context_length)
    penalty = penalty_doubt(settings.algorithm.advantage.length_penalty, most)
    stale = settings.trainer.max_staleness
    warmup = warmup_doubt(settings.trainer.optimizer, num_steps=settings.trainer.num_steps)
    return [*doubts(settings.filters, settings.algorithm, max_staleness=stale), *filter(None, [penalty, warmup])]


def _open_ledger(config: TrainerConfig, checkpoint: Checkpoint | None) -> GroupLedger[Finished, Delivery]:
    gate = Gate(max_staleness=config.max_staleness, groups_per_step=config.groups_per_step)
    return GroupLedger(gate) if checkpoint is None else GroupLedger.from_state(checkpoint.state["ledger"], gate)


async def _open_evaluator(
    settings: TrainerSettings,
    start: StartingPoint,
    sets: Mapping[str, EvaluationSet],
    publisher: WeightPublisher,
    logs: RunLogs,
    bus: Bus,
    images: ImageStore,
    *,
    epoch: str,
) -> Evaluator | None:
    """Return what evaluates the sets; without any, give up an evaluation that an earlier start left."""
    record = await open_held_out_record(bus, trainer_epoch=epoch)
    if not sets:
        await give_up_interrupted(start.folder, record)
        return None
    return Evaluator(
        settings.evaluation,
        sets,
        bus=bus,
        images=images,
        trackers=logs.trackers,
        folder=start.folder,
        run_id=start.run_id,
        epoch=epoch,
        step=start.step,
        num_steps=settings.trainer.num_steps,
        is_resumed=start.checkpoint is not None,
        episodes=logs.episodes,
        holding=ReplicaHolding(publisher, record, run_folder=start.folder, num=settings.evaluation.held_out_replicas),
    )


def _streams(config: TrainerConfig, algorithm: AlgorithmConfig) -> bool:
    if config.streaming and (setting := whole_batch_setting(algorithm)):
        log.info("batches.not_streamed", reason=f"with {setting} each group's gradient depends on the whole batch")
        return False
    return config.streaming


def _publisher(
    config: WeightSyncConfig,
    folder: Path,
    replicas: Watch,
    security: Security,
    *,
    host: str,
    has_gpu: bool,
    keeps_on_host: bool,
) -> WeightPublisher:
    if has_gpu:
        os.environ.update(nccl.environment())  # read when the first process group forms
    return WeightPublisher(
        config=config,
        host=host,
        replicas=replicas,
        security=security,
        backend="nccl" if has_gpu else "gloo",
        files=WeightFileStore.of_run(config, folder),
        keeps_on_host=keeps_on_host,
    )


async def _open_groups(bus: Bus, stack: AsyncExitStack, *, fresh_run: bool) -> Consumer:
    """Open the consumer of finished groups; a new run begins with empty queues."""
    if fresh_run:
        for stream in (bus.prompts, bus.groups):
            if num_messages := await bus.purge(stream):
                log.warning("stream.purged", stream=stream.name, num_messages=num_messages)
    return await stack.enter_async_context(
        consuming(
            bus,
            bus.groups,
            "trainer",
            ack_wait_s=_GROUP_ACK_WAIT_S,
            max_ack_pending=-1,  # each stays in hand until the next checkpoint, however far that is
            fresh=True,
        )
    )
