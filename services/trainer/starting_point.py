"""Where a run begins or continues: its newest checkpoint, and what NATS knows of it."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bus.connection import Bus
from penstock.errors import ConfigError, SetupError
from penstock.runtime.disk_space import disk_full_reported
from services.trainer.checkpoint.store import Checkpoint, CheckpointStore
from services.trainer.config import TrainerSettings
from services.trainer.telemetry.metrics_log import has_steps
from services.trainer.versions import PolicyVersions, open_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """Inputs from which the parts of a run are built."""

    run_id: str
    """The checkpoint's; for a new run one that no earlier run had, so that what those left on the bus is not used."""
    folder: Path
    """Folder of the run."""
    checkpoints: CheckpointStore
    checkpoint: Checkpoint | None
    """The newest one; None for a new run."""
    versions: PolicyVersions

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Metrics of the checkpoint's step; empty if the log had them already."""
        return {} if self.checkpoint is None else dict(self.checkpoint.state.get("metrics", {}))

    @property
    def demonstration_position(self) -> int:
        """At which the demonstrations of the next step begin; 0 if the run had none so far."""
        return 0 if self.checkpoint is None else int(self.checkpoint.state.get("demonstration_position", 0))

    @property
    def version(self) -> int | None:
        """Policy version of the checkpoint's weights."""
        return None if self.checkpoint is None else int(self.checkpoint.state["version"])


async def find_starting_point(settings: TrainerSettings, bus: Bus) -> StartingPoint:
    """Find the newest checkpoint of the run, and keep every earlier trainer from writing another one.

    Raises:
        ConfigError: the checkpoint has more steps than the run is to have.
        SetupError: checkpoints are damaged, missing or unreadable, NATS does not answer, or the disk is full.
    """
    folder = settings.run.folder or settings.run.dir / settings.run.name
    checkpoints = CheckpointStore(folder / "checkpoints", keep=settings.trainer.keep_checkpoints)
    with disk_full_reported(folder, "make room and start the run again"):
        await asyncio.to_thread(checkpoints.claim)
    checkpoint = await asyncio.to_thread(checkpoints.latest)
    versions = await open_versions(bus)
    if checkpoint is None:
        versions.require_checkpoint(checkpoints.folder, has_steps=await asyncio.to_thread(has_steps, folder))
        run_id = new_run_id(settings.run.name)
    elif "ledger" not in checkpoint.state:
        raise SetupError(
            f"{checkpoint.path} is a checkpoint of supervised training, which `penstock sft --resume` continues; to go "
            f"on from its weights, begin a run with --model.path={checkpoint.model_path}"
        )
    elif checkpoint.step > settings.trainer.num_steps:
        raise ConfigError(
            f"trainer.num_steps = {settings.trainer.num_steps} counts the steps of the whole run, and its newest "
            f"checkpoint is of step {checkpoint.step}; give at least that, or more to go on"
        )
    else:
        run_id = str(checkpoint.state["run_id"])
    return StartingPoint(
        run_id=run_id, folder=folder, checkpoints=checkpoints, checkpoint=checkpoint, versions=versions
    )


def new_run_id(name: str) -> str:
    """Return an identity for a run that begins now, from its name."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
