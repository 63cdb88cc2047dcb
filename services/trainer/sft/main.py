"""Supervised training as one process: from the newest checkpoint to the last step or a signal."""

import asyncio
from pathlib import Path

import structlog

from penstock.runtime.disk_space import disk_full_reported
from services.trainer.sft.assembly import assemble
from services.trainer.sft.config import SftSettings
from services.trainer.sft.loop import Observer, SftLoop
from services.trainer.telemetry.curves import draw_loss_curves, is_drawn

log = structlog.get_logger()


async def train(
    settings: SftSettings,
    folder: Path,
    stop: asyncio.Event,
    observer: Observer,
) -> Path | None:
    """Train until the recipe's last step or until `stop`, draw the curves, and return the newest model folder.

    A cancellation waits for nothing, neither a step nor what is being read or sent: the process must end after it.

    Args:
        settings: Of the run.
        folder: The run folder, which no other process uses.
        stop: When it is set, the step under way is finished and a checkpoint written.
        observer: Told how far the run is.

    Raises:
        UserError: the model, the data or the checkpoints are not as the run needs them, or the disk is full.
    """
    with disk_full_reported(folder, f"make room and continue with `penstock sft --resume {folder}`"):
        loop = await asyncio.to_thread(assemble, settings, folder, observer)
        try:
            await loop.run(stop)
        except asyncio.CancelledError:  # the process ends, and its ranks and threads with it
            raise
        except BaseException:
            await _close(loop)
            raise
        await _close(loop)
        await asyncio.to_thread(_draw, loop, folder)
    log.info("run.ended", step=loop.step, num_steps=loop.num_steps, folder=str(folder))
    newest = loop.checkpoints.latest()
    return None if newest is None else newest.model_path


def _draw(loop: SftLoop, folder: Path) -> None:
    """Draw the losses of all steps and validations. Blocks."""
    if rows := loop.metrics.rows(is_drawn):
        title = f"{loop.run_id}: {len(rows)} steps"
        draw_loss_curves(rows, loop.validations.rows(is_drawn), folder / "curves.png", title=title)


async def _close(loop: SftLoop) -> None:
    await loop.batches.close()
    await asyncio.to_thread(loop.backend.close)
    await asyncio.to_thread(loop.trackers.close)
