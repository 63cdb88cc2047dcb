"""Settings of the filters before the batch: section `[filters]` of a recipe."""

from typing import Literal, Self

import pydantic

from penstock.config import Config
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.presets import PRESETS


class FilterConfig(Config):
    """Filters that leave samples and groups out of training before batches are formed."""

    zero_variance: bool = False
    """Leave out groups whose judged samples all have the same reward, or are all masked: they say nothing about which
    answer is better. The next prompt takes the place, so every group of a batch teaches something (DAPO's dynamic
    sampling). Rewards are compared before length penalties."""
    truncated: Literal["keep", "mask", "zero"] = "keep"
    """Samples cut by length or by a deadline. keep: trained with their own reward. mask: no gradient; their rewards
    still count in their group's mean, their tokens in denominators (DAPO's overlong filtering). zero: a reward above 0
    becomes 0."""
    repetition: Literal["keep", "mask", "drop"] = "keep"
    """Samples whose text repeats itself. mask: as for truncated. drop: treated as never sampled; a group with fewer
    than two samples left is filtered, and the next prompt takes its place."""
    max_compression_ratio: float = pydantic.Field(default=10.0, gt=0)
    """A text repeats itself if its last 10,000 characters are more than this many times larger than their zlib
    compression; prose and mathematics reach 2 to 4."""
    overlong_prompts: Literal["keep", "drop"] = "drop"
    """Rows whose prompt, images included, leaves less than sampling.max_new_tokens of the context. drop: the next row
    takes the place. keep: they are played with the remaining room, and fail if there is none."""
    max_filtered_share: float = pydantic.Field(default=0.95, gt=0, le=1)
    """The run ends with an error if more than this share of the last 256 groups was filtered; 1 never ends it."""

    @pydantic.model_validator(mode="after")
    def _has_no_idle_setting(self) -> Self:
        default = type(self).model_fields["max_compression_ratio"].default
        if self.repetition == "keep" and self.max_compression_ratio != default:
            raise ValueError(
                f"max_compression_ratio = {self.max_compression_ratio:g} has no effect with repetition = 'keep'; set "
                "repetition = 'mask' or 'drop', or leave it out"
            )
        return self


def contradiction(filters: FilterConfig, algorithm: AlgorithmConfig) -> str:
    """Return why a run cannot have these settings together; empty if it can."""
    if filters.zero_variance and algorithm.advantage.kind == "reinforce_pp":
        return (
            "filters.zero_variance = true leaves out groups of equal rewards, but algorithm.advantage.kind = "
            "'reinforce_pp' compares each sample with the whole batch and learns from them; set "
            "filters.zero_variance = false or algorithm.advantage.kind = 'reinforce_pp_baseline'"
        )
    return ""


def doubts(filters: FilterConfig, algorithm: AlgorithmConfig, *, max_staleness: int) -> list[str]:
    """Return warnings about combinations of settings that may be unintended."""
    found = []
    if filters.zero_variance and (algorithm.regularises or algorithm.entropy.kind != "none"):
        found.append(
            "filters.zero_variance = true keeps groups of equal rewards from the algorithm's KL, drift and entropy "
            "terms too, which then see the policy only where its answers differ"
        )
    if filters.zero_variance and algorithm.advantage.kind == "custom":
        found.append(
            "filters.zero_variance = true leaves out groups of equal rewards; check that algorithm.advantage.function "
            f"= {algorithm.advantage.function!r} gives them no advantage"
        )
    if filters.truncated == "mask" and algorithm.advantage.length_penalty.kind != "none":
        found.append(
            "filters.truncated = 'mask' takes the gradient of the longest samples, which "
            f"algorithm.advantage.length_penalty.kind = {algorithm.advantage.length_penalty.kind!r} penalises most"
        )
    advantage = algorithm.advantage
    whitens = advantage.norm != "none" or advantage.kind.startswith("reinforce_pp")
    if whitens and advantage.length_penalty.kind != "none" and not filters.zero_variance:
        filtered = "" if advantage.kind == "reinforce_pp" else "filters.zero_variance = true, or "
        found.append(
            f"algorithm.advantage.length_penalty.kind = {advantage.length_penalty.kind!r} teaches as much as right and "
            "wrong in a batch whose rewards are all equal, because advantages are divided by their deviation over the "
            f"batch; set {filtered}algorithm.advantage.norm = 'none' with kind = 'dr_grpo'"
        )
    preset = PRESETS[algorithm.preset]
    as_published = (preset.get("anchor"), preset.get("trust_region", {}).get("kind"))
    kind = algorithm.trust_region.kind
    if algorithm.anchor == "proximal" and kind in ("clip", "cispo") and as_published != ("proximal", kind):
        found.append(
            f"algorithm.trust_region.kind = {kind!r} never acts with anchor = 'proximal': each version has one step, "
            "before which the policy is its own anchor and every ratio is 1; set algorithm.anchor = 'rollout', or "
            "'log_linear' with trainer.max_staleness = 2 or more"
        )
    if algorithm.anchor == "proximal" and algorithm.ratio == "sequence":
        found.append(
            "algorithm.ratio = 'sequence' has no effect with anchor = 'proximal', by which every ratio is 1; set "
            "algorithm.anchor = 'rollout'"
        )
    if max_staleness < 2 and algorithm.anchor == "log_linear":
        idle = "" if algorithm.correction.kind == "none" else ", and the correction weighs by ratios of 1"
        found.append(
            "algorithm.anchor = 'log_linear' estimates nothing for tokens less than two versions old: with "
            f"trainer.max_staleness = {max_staleness} it is the engine's log-probability{idle}; set "
            "trainer.max_staleness to 2 or more, or algorithm.anchor = 'rollout' and algorithm.correction.kind = 'none'"
        )
    exact_lag = {"rollout": max_staleness, "proximal": 0, "log_linear": 1}[algorithm.anchor]
    if max_staleness > exact_lag and algorithm.correction.kind == "none":
        found.append(
            f"trainer.max_staleness = {max_staleness} trains tokens of earlier versions, which algorithm.anchor = "
            f"{algorithm.anchor!r} without a correction treats as sampled by the anchor; set algorithm.correction.kind "
            "= 'truncate', or algorithm.anchor = 'rollout'"
        )
    return found
