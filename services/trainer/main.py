"""The trainer process: brings the parts of a run together, from its last checkpoint if there is one."""

import asyncio
import json
import os
import time
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

import nats.js.errors
import structlog
from nats.js.kv import KeyValue

from penstock.bus import leases
from penstock.bus.connection import Bus, connect
from penstock.bus.consumer import Consumer, consuming
from penstock.bus.failures import setting_up
from penstock.bus.lock import locked
from penstock.bus.replica_lease import read_replica
from penstock.rpc.server import RpcServer, service_name
from penstock.runtime.process import end_task, unless_stopped
from penstock.v1 import trainer_pb2, trainer_pb2_grpc
from penstock.weights import nccl
from services.recipe import Recipe
from services.trainer.config import PushConfig
from services.trainer.data.rows import open_dataset
from services.trainer.flow.collector import Collector
from services.trainer.flow.feeder import Feeder
from services.trainer.flow.gate import Gate
from services.trainer.policy.checkpoint import Checkpoint, CheckpointStore
from services.trainer.policy.opening import open_policy
from services.trainer.policy.optimizer import PolicyOptimizer
from services.trainer.push.publisher import WeightPublisher
from services.trainer.push.snapshots import Snapshots
from services.trainer.replay.recorder import StepRecorder
from services.trainer.replay.settings import StepSettings
from services.trainer.report.curves import draw_curves
from services.trainer.report.metrics_log import MetricsLog
from services.trainer.report.progress import Progress, TrainerServicer
from services.trainer.training_run import TrainingRun

log = structlog.get_logger()

_GROUP_ACK_WAIT_S = 60.0
"""A group that was lost on its way is delivered again after this long; those in hand, from one checkpoint to the next,
are kept by heartbeats."""
_MAX_GROUPS_IN_HAND = 100_000


async def serve(recipe: Recipe, stop: asyncio.Event) -> None:
    """Train until the recipe's last step or until `stop`, and draw the curves."""
    folder = recipe.run.folder or recipe.run.dir / recipe.run.name
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect(recipe.bus, run=recipe.run.name))
        await bus.ensure_streams()
        await stack.enter_async_context(locked(bus, "trainer", ttl_s=recipe.bus.lease_ttl_s))
        store = CheckpointStore(folder / "checkpoints", keep=recipe.trainer.keep_checkpoints)
        checkpoint = await asyncio.to_thread(store.latest)
        progress = Progress(run_id=_run_id(recipe, checkpoint), num_steps=recipe.trainer.num_steps)
        server = RpcServer(host=recipe.trainer.host, port=recipe.trainer.port)
        name = service_name(trainer_pb2.DESCRIPTOR, "TrainerService")
        server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, TrainerServicer(progress), name)
        await server.start()
        stack.push_async_callback(server.drain, 1.0)
        building = _build(recipe, folder, bus, stack, store, checkpoint, progress)
        run = await unless_stopped(building, stop)
        if run is None:
            return
        await _run_with_helpers(run, stop)
        rows = run.metrics.rows()
        if rows:
            title = f"{progress.run_id}: {len(rows)} steps"
            await asyncio.to_thread(draw_curves, rows, folder / "curves.png", title=title)
        log.info("run.ended", step=run.step, num_steps=recipe.trainer.num_steps, folder=str(folder))


async def _run_with_helpers(run: TrainingRun, stop: asyncio.Event) -> None:
    """The loop, beside the tasks that it needs; an error in any of them ends all."""
    async with asyncio.TaskGroup() as tasks:
        helpers = [tasks.create_task(run.collector.run()), tasks.create_task(run.publisher.keep_current())]
        await run.run(stop)
        for helper in helpers:
            await end_task(helper)


async def _build(
    recipe: Recipe,
    folder: Path,
    bus: Bus,
    stack: AsyncExitStack,
    store: CheckpointStore,
    checkpoint: Checkpoint | None,
    progress: Progress,
) -> TrainingRun:
    config = recipe.trainer
    bounds = {"max_staleness": config.max_staleness, "groups_per_step": config.groups_per_step}
    gate = Gate(**bounds) if checkpoint is None else Gate.from_state(checkpoint.state["gate"], **bounds)
    dataset = await asyncio.to_thread(open_dataset, recipe.data, seed=recipe.run.seed)
    optimizer, reader = await asyncio.to_thread(
        open_policy,
        recipe.model.path,
        None if checkpoint is None else checkpoint.path,
        seed=recipe.run.seed,
        temperature=recipe.sampling.temperature,
        config=config,
    )
    step = 0 if checkpoint is None else checkpoint.step
    progress.step = progress.checkpoint_step = step

    policy_bucket = await bus.bucket("policy")
    consumer = await _open_groups(bus, stack, fresh_run=checkpoint is None)
    collector = Collector(
        consumer=consumer,
        gate=gate,
        reader=reader,
        run_id=progress.run_id,
        max_failures_in_a_row=config.max_failures_in_a_row,
    )
    ttl_s = recipe.bus.lease_ttl_s
    replicas = await stack.enter_async_context(leases.watched(await bus.bucket("replicas", ttl_s=ttl_s), ttl_s=ttl_s))
    version = first_version(
        checkpoint=None if checkpoint is None else int(checkpoint.state["version"]),
        published=await _version_at(policy_bucket, "current", recipe.bus.url),
        reserved=await _version_at(policy_bucket, "reserved", recipe.bus.url),
        newest_held=_newest_held(replicas),
    )
    has_gpu = optimizer.device.type == "cuda"
    if has_gpu:
        os.environ.update(nccl.environment())  # read when the first group forms
    publisher = WeightPublisher(
        config=config.push,
        replicas=replicas,
        backend="nccl" if has_gpu else "gloo",
        snapshots=Snapshots(_snapshot_dir(config.push, folder)),
    )
    stack.push_async_callback(publisher.close)
    log.info("run.opened", run_id=progress.run_id, step=step, version=version, resumed=checkpoint is not None)
    return TrainingRun(
        config=config,
        folder=folder,
        base_model=recipe.model.path,
        bus=bus,
        policy_bucket=policy_bucket,
        progress=progress,
        optimizer=optimizer,
        publisher=publisher,
        gate=gate,
        feeder=Feeder(
            dataset=dataset,
            gate=gate,
            collector=collector,
            bus=bus,
            run_id=progress.run_id,
            incarnation=uuid.uuid4().hex[:8],
            samples_per_group=config.samples_per_group,
            profile=recipe.data.profile,
            environment=recipe.data.environment,
        ),
        collector=collector,
        checkpoints=store,
        metrics=MetricsLog(folder, last_step=step),
        recorder=_recorder(recipe, folder, optimizer, progress.run_id) if config.record_groups else None,
        version=version,
        step=step,
        saved_version=None if checkpoint is None else int(checkpoint.state["version"]),
    )


def _recorder(recipe: Recipe, folder: Path, optimizer: PolicyOptimizer, run_id: str) -> StepRecorder:
    settings = StepSettings.of(
        model_path=recipe.model.path,
        seed=recipe.run.seed,
        temperature=recipe.sampling.temperature,
        trainer=recipe.trainer,
    )
    return StepRecorder(folder, settings, optimizer, run_id=run_id)


def _snapshot_dir(config: PushConfig, folder: Path) -> Path | None:
    if config.transport != "disk" and not config.snapshots:
        return None
    return Path(config.snapshot_dir).absolute() if config.snapshot_dir else folder.absolute() / "snapshots"


def _run_id(recipe: Recipe, checkpoint: Checkpoint | None) -> str:
    """The checkpoint's; otherwise a new one, so that nothing on the bus from an earlier run is taken for this one's."""
    if checkpoint is not None:
        return str(checkpoint.state["run_id"])
    return f"{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _newest_held(replicas: leases.Watch) -> int:
    living = (read_replica(key, value) for key, value in replicas.values.items())
    return max((replica.policy_version for replica in living if replica is not None), default=0)


async def _version_at(bucket: KeyValue, key: str, url: str) -> int:
    try:
        with setting_up("bucket policy", url, passing=nats.js.errors.KeyNotFoundError):
            entry = await bucket.get(key)
    except nats.js.errors.KeyNotFoundError:
        return 0
    return int(json.loads(entry.value or b"{}")["version"])


def first_version(*, checkpoint: int | None, published: int, reserved: int, newest_held: int) -> int:
    """The version under which a trainer publishes what it starts with: never one that other weights have had.

    After an orderly stop the checkpoint holds what was published last, so that number still stands for these weights,
    and groups that were played with them are as fresh as they were.

    Args:
        checkpoint: Version of the weights in the checkpoint; None for a new run.
        published: The version that was announced last.
        reserved: The last version that a push was begun for.
        newest_held: The newest version that a living replica holds: NATS may have lost what it was told.
    """
    last = max(published, reserved, newest_held, checkpoint or 0)
    return last if checkpoint == published == last else last + 1


async def _open_groups(bus: Bus, stack: AsyncExitStack, *, fresh_run: bool) -> Consumer:
    """The consumer of finished groups; a run that starts anew begins with empty queues."""
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
            max_ack_pending=_MAX_GROUPS_IN_HAND,
            fresh=True,
        )
    )
