"""Settings of the algorithm: section `[algorithm]` of a recipe, with one section for each axis.

Imports nothing heavy, so that a mistyped key is reported before torch is loaded. This module rejects every combination
of axes that cannot work, with the reason; errors that depend on data (a reward below 0) are raised where they occur.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

import pydantic

from penstock.config import Config
from services.trainer.algorithm.axes import (
    AdvantageConfig,
    AggregationConfig,
    CorrectionConfig,
    EntropyConfig,
    KlConfig,
    RejectionConfig,
    TrustRegionConfig,
)
from services.trainer.algorithm.presets import PRESETS


class AlgorithmConfig(Config):
    """Turns rewards into a gradient: a preset, and one section for each axis in which a run differs from it.

    The defaults shown here apply to axes that the preset does not set. tis sets anchor and correction.
    """

    preset: Literal[
        "tis",
        "ppo",
        "decoupled_ppo",
        "dppo",
        "gspo",
        "cispo",
        "icepop",
        "m2po",
        "dapo",
        "slime_geo3k",
        "rlinf_geo3k",
    ] = "tis"
    """Starting values of the axes (docs/training/algorithms.md)."""
    anchor: Literal["rollout", "proximal", "log_linear"] = "proximal"
    """Log-probabilities that the trust region's ratio is taken against. rollout: the engine's. proximal: those of the
    trainer's weights before the step. log_linear: an estimate of those one version earlier, from the engine's and the
    version of each token."""
    ratio: Literal["token", "sequence"] = "token"
    """The ratio of each token, or the geometric mean of a sample's ratios for all of its tokens (GSPO)."""
    drift: float = pydantic.Field(default=0.0, ge=0)
    """Factor of a penalty on the squared log ratio of policy to engine, on every token."""
    advantage: AdvantageConfig = AdvantageConfig()
    trust_region: TrustRegionConfig = TrustRegionConfig()
    correction: CorrectionConfig = CorrectionConfig()
    rejection: RejectionConfig = RejectionConfig()
    kl: KlConfig = KlConfig()
    entropy: EntropyConfig = EntropyConfig()
    aggregation: AggregationConfig = AggregationConfig()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _starts_from_the_preset(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        name = given.get("preset", cls.model_fields["preset"].default)
        preset = PRESETS.get(name, {}) if isinstance(name, str) else {}
        return {**preset, **{key: _over(preset.get(key), value) for key, value in given.items()}}

    @pydantic.model_validator(mode="after")
    def _axes_fit(self) -> Self:
        if self.anchor == "rollout" and self.correction.kind != "none":
            raise ValueError(
                f"correction.kind = {self.correction.kind!r} with anchor = 'rollout' counts the ratio to the engine "
                "twice; set anchor = 'proximal' or correction.kind = 'none'"
            )
        if self.anchor == "proximal" and self.trust_region.kind.startswith("dppo"):
            raise ValueError(
                f"trust_region.kind = {self.trust_region.kind!r} never acts with anchor = 'proximal', which is the "
                "policy itself before the only step of a version; set anchor = 'rollout'"
            )
        if self.ratio == "sequence" and self.trust_region.kind.startswith("dppo"):
            raise ValueError(
                f"trust_region.kind = {self.trust_region.kind!r} compares probabilities of tokens; set ratio = 'token'"
            )
        if self.ratio == "sequence" and self.aggregation.kind != "sequence":
            raise ValueError(
                f"ratio = 'sequence' with aggregation.kind = {self.aggregation.kind!r} would weigh each sample's ratio "
                "by its length; set aggregation.kind = 'sequence'"
            )
        if self.ratio == "sequence" and self.correction.kind != "none" and self.correction.level == "token":
            raise ValueError(
                "correction.level = 'token' with ratio = 'sequence' would weigh the tokens of a sample, which share "
                "one ratio, unequally; set correction.level = 'sequence' or 'geometric'"
            )
        if self.ratio == "sequence" and self.rejection.kind == "m2po":
            raise ValueError(
                "rejection.kind = 'm2po' with ratio = 'sequence' would leave out single tokens of samples, whose "
                "tokens share one ratio; set rejection.kind = 'geometric', 'k3' or 'opsm', which leave out samples"
            )
        if self.kl.kind == "k1_in_reward" and self.advantage.kind != "reinforce_pp":
            raise ValueError(
                "kl.kind = 'k1_in_reward' gives each token a reward of its own, but advantage.kind = "
                f"{self.advantage.kind!r} compares samples; set kl.kind = 'k2' or advantage.kind = 'reinforce_pp'"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        return self.kl.kind != "none"

    @property
    def regularises(self) -> bool:
        """Whether a KL or drift term gives tokens without an advantage a gradient.

        An entropy bonus does too, but only in steps whose coefficient is above 0.
        """
        return self.drift > 0 or self.kl.kind in ("k2", "k3", "k3_plus")


def _over(preset: Any, given: Any) -> Any:
    """Merge a section into the preset's; a section of another kind takes nothing from the preset."""
    if not isinstance(preset, Mapping) or not isinstance(given, Mapping):
        return given
    kind = preset.get("kind")
    return {**preset, **given} if given.get("kind", kind) == kind else given
