"""Settings of the algorithm: section `[algorithm]` of a recipe, with one section for each axis.

Imports nothing heavy, so that a mistyped key is reported before torch is loaded.
"""

from collections.abc import Mapping
from typing import Any, Literal

import pydantic

from penstock.config import Config
from services.trainer.algorithm.presets import PRESETS


class AdvantageConfig(Config):
    """How much better each sample is than the others of its group."""

    kind: Literal["grpo", "dr_grpo"] = "grpo"
    """grpo: reward minus the group's mean, divided by the group's standard deviation. dr_grpo: without the division."""


class TrustRegionConfig(Config):
    """What keeps the policy near the anchor within one step."""

    kind: Literal["none", "clip"] = "none"
    """none: the ratio as it is. clip: PPO's clipped ratio."""
    clip_low: float = pydantic.Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped at 1 - clip_low (clip)."""
    clip_high: float = pydantic.Field(default=0.2, ge=0)
    """The ratio is clipped at 1 + clip_high (clip)."""


class CorrectionConfig(Config):
    """Importance weight of the anchor against the engine, for tokens that the anchor did not sample."""

    kind: Literal["none", "truncate"] = "none"
    """none: 1. truncate: the ratio of the anchor to the engine, at most `high`."""
    high: float = pydantic.Field(default=2.0, gt=0)
    """Largest weight of a token."""


class AggregationConfig(Config):
    """The mean that the loss takes over tokens. Denominators count every token of the batch."""

    kind: Literal["token", "sequence"] = "token"
    """token: the mean over all tokens of the optimizer batch. sequence: over samples, of each sample's mean."""


class AlgorithmConfig(Config):
    """How rewards become a gradient: a preset, and one section for each axis in which a run differs from it."""

    preset: Literal["tis", "ppo"] = "tis"
    """Where every axis starts from (docs/algorithms.md)."""
    anchor: Literal["rollout", "proximal"] = "proximal"
    """What the ratio of the trust region is taken against. rollout: the engine's log-probabilities. proximal: those of
    the trainer's weights before the step."""
    advantage: AdvantageConfig = AdvantageConfig()
    trust_region: TrustRegionConfig = TrustRegionConfig()
    correction: CorrectionConfig = CorrectionConfig()
    aggregation: AggregationConfig = AggregationConfig()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _starts_from_the_preset(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        name = given.get("preset", cls.model_fields["preset"].default)
        preset = PRESETS.get(name, {}) if isinstance(name, str) else {}
        return {**preset, **{key: _over(preset.get(key), value) for key, value in given.items()}}


def _over(preset: Any, given: Any) -> Any:
    """Lay a section over that of the preset; one of another kind takes nothing from it."""
    if not isinstance(preset, Mapping) or not isinstance(given, Mapping):
        return given
    kind = preset.get("kind")
    return {**preset, **given} if given.get("kind", kind) == kind else given
