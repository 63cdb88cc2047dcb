"""Settings of supervised training: section `[sft]` of a recipe.

Everything else is where reinforcement learning has it: `[data]`, `[trainer]` and `[trackers]`.
"""

import dataclasses
from typing import Literal

import pydantic

from penstock.config import Config, MetricsConfig, ModelConfig, RunConfig
from penstock.errors import ConfigError
from services.trainer.config import TrackersConfig, TrainerConfig
from services.trainer.data.config import DataConfig
from services.trainer.evaluation.config import EvaluationConfig


class SftConfig(Config):
    """Supervised training, `penstock sft`: the model learns what assistants say in the rows of `[data]`.

    Of `[trainer]` it takes the settings of how a step is computed and when checkpoints are written.
    """

    batch_size: int = pydantic.Field(default=32, ge=1)
    """Size of the batch of one optimizer step."""
    batch_unit: Literal["samples", "tokens"] = "samples"
    """What batch_size counts. tokens: as many samples as fit, images and prompts included, at least one."""
    epochs: float = pydantic.Field(default=0.0, ge=0)
    """How often each row is trained, in place of trainer.num_steps, for one source and a batch_size in samples. Rows
    that are known to be too long or wrong before the first step do not count: those among the first 5,000, and too long
    ones that `penstock data --sft` has found. 0: trainer.num_steps says how long the run is."""
    max_tokens: int = pydantic.Field(default=0, ge=0)
    """Samples with more tokens, images included, are passed over, never cut. 0: those that exceed the model's
    context."""
    validate_every: int = pydantic.Field(default=0, ge=0)
    """Steps between measurements of the loss on the evaluation sets, [evaluation.sets.NAME]; also before the first step
    and after the last. 0: none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SftSettings:
    """All that supervised training receives."""

    sft: SftConfig
    trainer: TrainerConfig
    run: RunConfig
    model: ModelConfig
    data: DataConfig
    trackers: TrackersConfig
    evaluation: EvaluationConfig


def require_meant(
    *,
    sft: SftConfig,
    trainer: TrainerConfig,
    data: DataConfig,
    evaluation: EvaluationConfig,
    metrics: MetricsConfig,
) -> None:
    """Refuse settings that would be expected to do something in supervised training and do not.

    Raises:
        ConfigError: there is one.
    """
    if evaluation.is_in_training:
        raise ConfigError(
            "evaluation.every, at_start and at_end play prompts with engines, which supervised training does not "
            "start; leave them out, set sft.validate_every for the loss on the same sets, and play them afterwards "
            "with `penstock eval --model RUN_FOLDER`"
        )
    if sft.validate_every and not evaluation.sets:
        raise ConfigError(
            f"sft.validate_every = {sft.validate_every} needs rows to measure; add a set, for example "
            "[evaluation.sets.test] with split = 'test'"
        )
    if data.pools.are_used:
        raise ConfigError(
            "data.pools passes over rows by the share of their samples that passed, and supervised training plays "
            "none; leave easy_chance and hard_chance at 1"
        )
    if data.max_prompt_tokens:
        raise ConfigError(
            f"data.max_prompt_tokens = {data.max_prompt_tokens} bounds prompts that are played; bound whole "
            "conversations with sft.max_tokens"
        )
    if trainer.record_groups:
        raise ConfigError(
            "trainer.record_groups = true keeps groups for `penstock replay`, and supervised training has none; "
            "leave it out"
        )
    if trainer.lora.rank:
        raise ConfigError(
            f"trainer.lora.rank = {trainer.lora.rank}: supervised training has no adapters yet; leave trainer.lora out"
        )
    if metrics.port is not None:
        raise ConfigError(
            f"metrics.port = {metrics.port} serves metrics to Prometheus, and supervised training serves none; leave "
            "it out, or unset it with --metrics.port=, and read metrics.jsonl or name trackers in trackers.use"
        )
    if sft.epochs and len(data.sources) > 1:
        raise ConfigError(
            f"sft.epochs = {sft.epochs:g} with {len(data.sources)} sources: they are mixed by their weights, not by "
            "their numbers of rows, so rows of one are trained more often than those of another; give "
            "trainer.num_steps, or one source with a list of paths"
        )
    if sft.epochs and sft.batch_unit == "tokens":
        raise ConfigError(
            f"sft.epochs = {sft.epochs:g} with batch_unit = 'tokens': how many steps that is, which the learning "
            "rate must know, follows from the lengths of all rows; give trainer.num_steps, or a batch_size in "
            "samples"
        )
