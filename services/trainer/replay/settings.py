"""The settings that decide what a batch does to the weights, as every recorded step keeps them."""

from pathlib import Path

import pydantic

from penstock.config import Config
from services.trainer.config import BackendConfig, TrainerConfig


class StepModel(Config):
    """The model that the run began with."""

    path: Path
    """Its folder. Read only where no checkpoint stands before the step."""


class StepRun(Config):
    """Where random numbers begin."""

    seed: int
    """Seed of the run."""


class StepSampling(Config):
    """How the policy was sampled, as far as the loss depends on it."""

    temperature: float = pydantic.Field(gt=0, le=100)
    """Divides the logits."""


class StepTrainer(BackendConfig):
    """How the step is computed, and which groups it may use."""

    max_staleness: int = pydantic.Field(ge=0)
    """A group whose oldest token lags the published version by more is left out of the batch."""


class StepSettings(Config):
    """All settings of a recorded step. Its keys are those of a recipe, so overrides read the same."""

    model: StepModel
    run: StepRun
    sampling: StepSampling
    trainer: StepTrainer

    @classmethod
    def of(cls, *, model_path: Path, seed: int, temperature: float, trainer: TrainerConfig) -> "StepSettings":
        """Take from a recipe what decides a step."""
        return cls(
            model=StepModel(path=model_path),
            run=StepRun(seed=seed),
            sampling=StepSampling(temperature=temperature),
            trainer=StepTrainer(**{name: getattr(trainer, name) for name in StepTrainer.model_fields}),
        )
