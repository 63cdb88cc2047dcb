"""The training loop's promises to those who come after a crash."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nats.js.errors
import pytest
import torch

from penstock.bus.connection import Bus
from services.trainer.config import TrainerConfig
from services.trainer.loop import TrainingLoop
from services.trainer.telemetry.progress import Progress
from services.trainer.versions import first_version


class PowerCutError(Exception):
    """The trainer dies."""


async def test_trainer_that_dies_while_it_pushes_never_reuses_the_number(bus: Bus, tmp_path: Path) -> None:
    """A replica may have got the weights although nobody announced them: their number is taken."""
    bucket = await bus.bucket("policy")

    async def die(_: Any) -> None:
        raise PowerCutError

    run = TrainingLoop(
        config=TrainerConfig(),
        folder=tmp_path,
        base_model=tmp_path,
        bus=bus,
        policy_bucket=bucket,
        progress=Progress(run_id="run", num_steps=10),
        optimizer=SimpleNamespace(named_weights=lambda: [("w", torch.ones(3))]),  # type: ignore[arg-type]
        publisher=SimpleNamespace(take=lambda _version, _named: None, publish=die),  # type: ignore[arg-type]
        ledger=None,  # type: ignore[arg-type]
        batches=None,  # type: ignore[arg-type]
        feeder=None,  # type: ignore[arg-type]
        collector=None,  # type: ignore[arg-type]
        checkpoints=None,  # type: ignore[arg-type]
        metrics=None,  # type: ignore[arg-type]
        recorder=None,
        version=7,
        step=7,
        saved_version=7,
    )
    with pytest.raises(PowerCutError):
        await run._publish(8)
    reserved = json.loads((await bucket.get("reserved")).value or b"{}")["version"]
    with pytest.raises(nats.js.errors.KeyNotFoundError):
        await bucket.get("current")
    assert first_version(checkpoint=7, published=7, reserved=reserved, newest_held=0) == 9
