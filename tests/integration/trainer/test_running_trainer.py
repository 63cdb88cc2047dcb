"""What viewers of its folder see of a trainer that no launcher has started."""

import asyncio
from pathlib import Path

import pytest

from penstock.bus.connection import Bus
from penstock.runtime.security import Security
from services.launch.settings.service_settings import for_trainer
from services.recipe import Recipe
from services.trainer.backend.base import TrainBackend
from services.trainer.config import TrainerSettings
from services.trainer.main import serve
from services.view.run_reader import RunReader


class DiedError(Exception):
    """The trainer dies."""


async def test_a_run_without_a_launcher_is_running_until_its_trainer_ends(
    bus: Bus, run_name: str, tmp_path: Path, tiny_model_path: Path
) -> None:
    """From before it has loaded its model, however it ends."""
    run = RunReader(tmp_path / run_name)
    seen: list[tuple[bool, bool]] = []

    def look(_: TrainerSettings) -> TrainBackend:
        seen.append((run.is_running, run.has_launcher))
        raise DiedError

    recipe = Recipe.model_validate(
        {
            "model": {"path": tiny_model_path},
            "run": {"name": run_name, "dir": tmp_path},
            "bus": bus.config,
            "trainer": {"port": 0},
        }
    )
    with pytest.raises(DiedError):
        await serve(for_trainer(recipe), asyncio.Event(), security=Security(), open_backend=look)
    assert seen == [(True, False)]
    assert not run.is_running
