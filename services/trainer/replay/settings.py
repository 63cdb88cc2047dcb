"""The settings that decide what a batch does to the weights. Every recorded step keeps them."""

from pathlib import Path
from typing import Self

import pydantic

from penstock.config import Config, ModelPath
from services.trainer.admission.config import FilterConfig, contradiction
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.checks.adapters import adapter_contradiction
from services.trainer.config import BackendConfig, TrainerConfig
from services.trainer.demonstrations.config import DemonstrationsConfig


class StepModel(Config):
    """The model that the run began with."""

    path: ModelPath
    """Its folder. Read only if no checkpoint precedes the step, or if checkpoints hold adapters alone."""


class StepRun(Config):
    """The part of `[run]` that a step depends on."""

    seed: int
    """Seed of torch's generator when the run began."""


class StepSampling(Config):
    """The part of `[sampling]` that the loss depends on."""

    temperature: float = pydantic.Field(gt=0, le=100)
    """Divides the logits."""


class StepDemonstrations(Config):
    """The part of `[demonstrations]` that a step depends on, beside the demonstrations that it learned."""

    coef: float = pydantic.Field(gt=0)
    """Factor of their cross-entropy."""


class StepTrainer(BackendConfig):
    """How the step is computed, and which groups it uses."""

    max_staleness: int = pydantic.Field(ge=0)
    """A group whose oldest token lags the published version by more than this is left out of the batch."""


class StepSettings(Config):
    """All settings of a recorded step. Its keys are those of a recipe, so overrides read the same."""

    model: StepModel
    run: StepRun
    sampling: StepSampling
    trainer: StepTrainer
    algorithm: AlgorithmConfig
    filters: FilterConfig = FilterConfig()
    demonstrations: StepDemonstrations | None = None

    @property
    def demonstration_coef(self) -> float | None:
        """`demonstrations.coef`; None without demonstrations."""
        return None if self.demonstrations is None else self.demonstrations.coef

    @pydantic.model_validator(mode="after")
    def _filters_fit_the_algorithm(self) -> Self:
        if reason := contradiction(self.filters, self.algorithm):
            raise ValueError(reason)
        if problem := adapter_contradiction(self.trainer.lora, self.algorithm.kl):
            raise ValueError(problem)
        return self

    @classmethod
    def of(
        cls,
        *,
        model_path: Path,
        seed: int,
        temperature: float,
        trainer: TrainerConfig,
        algorithm: AlgorithmConfig,
        filters: FilterConfig,
        demonstrations: DemonstrationsConfig | None = None,
    ) -> "StepSettings":
        """Take the settings of a step from those of a run."""
        return cls(
            model=StepModel(path=model_path),
            run=StepRun(seed=seed),
            sampling=StepSampling(temperature=temperature),
            trainer=StepTrainer(**{name: getattr(trainer, name) for name in StepTrainer.model_fields}),
            algorithm=algorithm,
            filters=filters,
            demonstrations=None if demonstrations is None else StepDemonstrations(coef=demonstrations.coef),
        )
