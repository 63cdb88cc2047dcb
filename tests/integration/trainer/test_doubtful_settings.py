"""Settings that work together, but perhaps not as they are meant, as the trainer's log has them."""

import asyncio
from pathlib import Path

import pytest
import structlog

from penstock.bus.connection import Bus
from penstock.runtime.security import Security
from services.launch.settings.service_settings import for_trainer
from services.recipe import Recipe
from services.trainer.backend.base import TrainBackend
from services.trainer.config import TrainerSettings
from services.trainer.main import serve

PENALTY = {"kind": "soft_overlong", "max_tokens": 100, "buffer_tokens": 50}


class LoadedError(Exception):
    """The trainer would load its model now."""


async def test_the_trainer_warns_of_all_doubts_before_it_loads_its_model(
    bus: Bus, run_name: str, tmp_path: Path, tiny_model_path: Path
) -> None:
    """Those of filters and algorithm together, of a length penalty, and of the learning rate; none of a usual run."""

    async def doubts(**sections: object) -> list[str]:
        settings = {
            "model": {"path": tiny_model_path},
            "run": {"name": run_name, "dir": tmp_path},
            "bus": bus.config,
            **sections,
        }

        def load(_: TrainerSettings) -> TrainBackend:
            raise LoadedError

        with structlog.testing.capture_logs() as logs, pytest.raises(LoadedError):
            await serve(
                for_trainer(Recipe.model_validate(settings)), asyncio.Event(), security=Security(), open_backend=load
            )
        return [line["reason"] for line in logs if line["event"] == "settings.doubtful"]

    masking, penalty, warmup = await doubts(
        sampling={"max_new_tokens": 80},
        filters={"truncated": "mask"},
        algorithm={"advantage": {"norm": "none", "length_penalty": PENALTY}},
        trainer={"num_steps": 5, "optimizer": {"warmup_steps": 5}},
    )
    assert masking.startswith("filters.truncated = 'mask' takes the gradient of the longest samples")
    assert penalty.startswith("answers end at 80 tokens, before algorithm.advantage.length_penalty.max_tokens = 100")
    assert warmup.startswith("trainer.optimizer.warmup_steps = 5 is not below the number of steps, 5")
    assert await doubts() == []
