"""The trainer process: assembles the run from its newest checkpoint and trains until the last step or a signal.

If torchrun starts it as a rank other than the first, it follows the first rank instead.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from penstock.bus.buckets.lock import TRAINER, locked
from penstock.bus.connection import connect
from penstock.bus.metrics import BusMetrics
from penstock.rpc.server import RpcServer, service_name
from penstock.runtime import garbage
from penstock.runtime.disk_space import disk_full_reported
from penstock.runtime.files import write_atomically
from penstock.runtime.process import end_task, unless_stopped
from penstock.runtime.security import Security
from penstock.telemetry.metrics import exposed
from penstock.telemetry.serving import serving_metrics
from penstock.v1 import trainer_pb2, trainer_pb2_grpc
from services.trainer.assembly import OpenBackend, assemble, followed, on_ranks
from services.trainer.config import TrainerSettings
from services.trainer.loop import TrainingLoop
from services.trainer.starting_point import find_starting_point
from services.trainer.telemetry.curves import draw_curves, is_drawn
from services.trainer.telemetry.progress import Progress, TrainerServicer
from services.trainer.telemetry.running_lock import shown_as_running
from services.trainer.telemetry.span_files import collecting_spans

log = structlog.get_logger()


async def serve(
    settings: TrainerSettings,
    stop: asyncio.Event,
    *,
    security: Security,
    open_backend: OpenBackend = on_ranks,
) -> None:
    """Train with the backend of `open_backend` until the recipe's last step or until `stop`, then draw the curves.

    Raises:
        UserError: the model, the data, NATS or the checkpoints do not fit the run, or the disk is full.
    """
    if await asyncio.to_thread(followed, settings):
        return
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect(settings.bus, run=settings.run.name, security=security))
        await bus.ensure_streams()
        # Before the lock: `penstock runs` reads there how often its holder renews it.
        await bus.bucket("replicas", ttl_s=settings.bus.lease_ttl_s)
        lock = await stack.enter_async_context(locked(bus, TRAINER, ttl_s=settings.bus.lease_ttl_s))
        start = await find_starting_point(settings, bus)
        await asyncio.to_thread(_keep_recipe, settings, start.folder)
        await stack.enter_async_context(shown_as_running(start.folder))
        if settings.trace.max_gib:
            collecting = collecting_spans(bus, start.folder, max_bytes=int(settings.trace.max_gib * 2**30))
            await stack.enter_async_context(collecting)
        progress = Progress(run_id=start.run_id, num_steps=settings.trainer.num_steps)
        await _serve_progress(settings, progress, security, stack)
        stack.enter_context(exposed(BusMetrics(bus).read))
        await stack.enter_async_context(serving_metrics(settings.metrics, settings.run, settings.network, security))
        with disk_full_reported(start.folder, "make room and start the run again, which continues from its checkpoint"):
            assembling = assemble(settings, start, bus, lock, progress, security, stack, open_backend=open_backend)
            loop = await unless_stopped(assembling, stop)
            if loop is None:
                return
            garbage.exempt_present_objects()
            await _run_beside_its_tasks(loop, stop)
            await asyncio.to_thread(loop.metrics.end)
            await asyncio.to_thread(_draw, loop)
        log.info("run.ended", step=loop.position.step, num_steps=settings.trainer.num_steps, folder=str(start.folder))


def _keep_recipe(settings: TrainerSettings, folder: Path) -> None:
    """Write the recipe of a run without a launcher into its folder: `penstock view` and others know runs by it. Blocks.

    Raises:
        SetupError: the disk is full.
    """
    if settings.recipe_text:
        with disk_full_reported(folder, "make room and start the run again"):
            write_atomically(folder / "config.toml", settings.recipe_text)


async def _serve_progress(
    settings: TrainerSettings, progress: Progress, security: Security, stack: AsyncExitStack
) -> None:
    server = RpcServer(host=settings.network.host, port=settings.trainer.port, key="trainer.port", security=security)
    name = service_name(trainer_pb2.DESCRIPTOR, "TrainerService")
    server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, TrainerServicer(progress), name)
    await server.start()
    stack.push_async_callback(server.drain, 1.0)


async def _run_beside_its_tasks(loop: TrainingLoop, stop: asyncio.Event) -> None:
    """Run the loop with the tasks that it needs; an error in one ends all of them, at once or, of data, in order."""
    async with asyncio.TaskGroup() as tasks:
        collecting = loop.until_wrong(loop.collector.run, stop)
        helpers = [tasks.create_task(collecting), tasks.create_task(loop.publisher.keep_current())]
        await loop.run(stop)
        for helper in helpers:
            await end_task(helper)


def _draw(loop: TrainingLoop) -> None:
    """Draw the curves of all steps. Blocks."""
    if rows := loop.metrics.rows(is_drawn):
        draw_curves(rows, loop.folder / "curves.png", title=f"{loop.progress.run_id}: {len(rows)} steps")
