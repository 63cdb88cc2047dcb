"""Settings of each axis: the sections inside `[algorithm]`.

Each rejects contradictory values, and values that its kind does not read. `config` puts the axes together.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic

from penstock.config import Config, ModelPath
from penstock.config.paths import UNSET_IF_EMPTY


class Axis(Config):
    """A section with a `kind`; each of its other settings belongs to some kinds."""

    uses: ClassVar[Mapping[str, str]] = {}
    """Settings that each kind reads. Settings that no kind names belong to all."""

    @pydantic.model_validator(mode="after")
    def _no_setting_is_in_vain(self) -> Self:
        kind = getattr(self, "kind", "")
        owners: dict[str, list[str]] = {}
        for owner, names in self.uses.items():
            for name in names.split():
                owners.setdefault(name, []).append(owner)
        for name, kinds in owners.items():
            value = getattr(self, name)
            if kind not in kinds and value != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name} = {value} has no effect with kind = {kind!r}; it is for {' or '.join(kinds)}")
        return self


def _check_function(kind: str, function: str) -> None:
    module, colon, name = function.partition(":")
    if kind == "custom" and not (module and colon and name):
        raise ValueError(f"kind = 'custom' needs function = 'module:function', found {function!r}")


class LengthPenaltyConfig(Axis):
    """Penalty on long answers, subtracted from the reward before samples are compared."""

    uses: ClassVar[Mapping[str, str]] = {
        "soft_overlong": "max_tokens buffer_tokens overlong_factor",
        "linear": "length_factor",
    }

    kind: Literal["none", "soft_overlong", "linear"] = "none"
    """soft_overlong: a penalty that grows from 0 to `overlong_factor` over the last `buffer_tokens` before `max_tokens`
    (DAPO). linear: `length_factor` of the group's mean reward, times own tokens over the group's longest."""
    max_tokens: int = pydantic.Field(default=0, ge=0)
    """Own tokens of a sample at which the penalty is full; usually sampling.max_new_tokens (soft_overlong)."""
    buffer_tokens: int = pydantic.Field(default=0, ge=0)
    """Tokens before `max_tokens` over which the penalty grows (soft_overlong)."""
    overlong_factor: float = pydantic.Field(default=1.0, gt=0)
    """The full penalty (soft_overlong)."""
    length_factor: float = pydantic.Field(default=0.25, gt=0)
    """Share of the group's mean reward that its longest sample loses (linear)."""

    @pydantic.model_validator(mode="after")
    def _has_a_ramp(self) -> Self:
        if self.kind == "soft_overlong" and not 0 < self.buffer_tokens <= self.max_tokens:
            raise ValueError(
                f"soft_overlong needs 0 < buffer_tokens <= max_tokens, found {self.buffer_tokens} and "
                f"{self.max_tokens}; DAPO's are 4096 and 20480"
            )
        return self


class AdvantageConfig(Axis):
    """The advantage: how much better each sample is than others."""

    uses: ClassVar[Mapping[str, str]] = {"custom": "function options"}

    kind: Literal["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "reinforce_pp_baseline", "custom"] = "grpo"
    """With r the reward: grpo: (r - group mean) / group standard deviation. dr_grpo: r - group mean. rloo: r - mean of
    the others of the group. maxrl: (r - group mean) / group mean. reinforce_pp: r, whitened over the batch.
    reinforce_pp_baseline: r - group mean, whitened over the batch. custom: `function`."""
    norm: Literal["none", "batch", "batch_std"] = "none"
    """Normalisation after the estimator. batch: subtract the mean over the batch's tokens and divide by their standard
    deviation. batch_std: divide by the standard deviation over the samples of the batch, so that no sign changes
    (ScaleRL)."""
    function: str = ""
    """Your own estimator, as module:function (custom)."""
    options: dict[str, float] = pydantic.Field(default_factory=dict)
    """Keyword arguments of `function` (custom)."""
    length_penalty: LengthPenaltyConfig = LengthPenaltyConfig()

    @pydantic.model_validator(mode="after")
    def _is_complete(self) -> Self:
        _check_function(self.kind, self.function)
        if self.kind == "maxrl" and self.length_penalty.kind != "none":
            raise ValueError(
                f"maxrl needs rewards of at least 0, which length_penalty.kind = {self.length_penalty.kind!r} can make "
                "negative; leave out one of them"
            )
        if self.kind == "grpo" and self.length_penalty.kind == "linear":
            raise ValueError(
                "grpo divides by the group's standard deviation, which cancels length_penalty.length_factor where all "
                "rewards are equal, so that length alone would teach as much as right and wrong; with "
                "length_penalty.kind = 'linear' set kind = 'dr_grpo' or 'rloo'"
            )
        if self.norm != "none" and self.kind.startswith("reinforce_pp"):
            raise ValueError(f"{self.kind} whitens over the batch already; leave out norm")
        return self


class TrustRegionConfig(Axis):
    """Keeps the policy near the anchor within one step."""

    uses: ClassVar[Mapping[str, str]] = {
        "clip": "clip_low clip_high dual",
        "cispo": "ratio_low ratio_high",
        "dppo_tv": "tv_low tv_high cap",
        "dppo_kl": "kl_max cap",
        "custom": "function options",
    }

    kind: Literal["none", "clip", "cispo", "dppo_tv", "dppo_kl", "custom"] = "none"
    """none: the plain ratio. clip: PPO's clipped ratio. cispo: the clipped ratio as a weight, so that no token loses
    its gradient. dppo_tv, dppo_kl: tokens whose probability moved too far lose their gradient, judged by the
    probability's difference or by the binary KL divergence. custom: `function`."""
    clip_low: float = pydantic.Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped at 1 - clip_low (clip)."""
    clip_high: float = pydantic.Field(default=0.2, ge=0)
    """The ratio is clipped at 1 + clip_high (clip)."""
    dual: float = pydantic.Field(default=0.0, ge=0)
    """Further upper clip of the ratio, for negative advantages; 0 is off, 3 is usual (clip)."""
    ratio_low: float = pydantic.Field(default=0.0, ge=0)
    """Smallest weight, an absolute ratio (cispo)."""
    ratio_high: float = pydantic.Field(default=5.0, gt=0)
    """Largest weight, an absolute ratio (cispo)."""
    tv_low: float = pydantic.Field(default=0.2, gt=0, le=1)
    """Tokens of negative advantage may lose this much probability (dppo_tv)."""
    tv_high: float = pydantic.Field(default=0.2, gt=0, le=1)
    """Tokens of positive advantage may gain this much probability (dppo_tv)."""
    kl_max: float = pydantic.Field(default=0.05, gt=0)
    """Largest binary KL divergence, in nats (dppo_kl)."""
    cap: float = pydantic.Field(default=0.0, ge=0)
    """Largest ratio that weights a gradient; 0 is no cap (dppo_tv, dppo_kl)."""
    function: str = ""
    """Your own trust region, as module:function (custom)."""
    options: dict[str, float] = pydantic.Field(default_factory=dict)
    """Keyword arguments of `function` (custom)."""

    @pydantic.model_validator(mode="after")
    def _is_complete(self) -> Self:
        _check_function(self.kind, self.function)
        if 0 < self.dual <= 1 + self.clip_high:
            raise ValueError(f"dual = {self.dual} must be 0 or above 1 + clip_high = {1 + self.clip_high}")
        if self.ratio_low >= self.ratio_high:
            raise ValueError(f"ratio_low = {self.ratio_low} must be below ratio_high = {self.ratio_high}")
        return self


class CorrectionConfig(Axis):
    """Importance weights of the anchor against the engine, for tokens that the anchor did not sample."""

    uses: ClassVar[Mapping[str, str]] = {
        "truncate": "level high normalize",
        "mask": "level low high normalize",
        "clip": "level low high normalize",
    }

    kind: Literal["none", "truncate", "mask", "clip"] = "none"
    """none: weight 1. truncate: the ratio of the anchor to the engine, at most `high`. mask: the ratio, or 0 outside
    `low` to `high`. clip: the ratio, at least `low` and at most `high`."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """token: the ratio of each token. sequence: the product of the ratios of a sample's tokens. geometric: their
    geometric mean."""
    low: float = pydantic.Field(default=0.0, ge=0)
    """Lower bound of the weight (mask, clip)."""
    high: float = pydantic.Field(default=2.0, gt=0)
    """Upper bound of the weight."""
    normalize: bool = False
    """Divide the weights by their mean over the batch."""
    veto_low: float = pydantic.Field(default=0.0, ge=0)
    """A sample with a token whose ratio of trainer to engine is below this has weight 0; 1e-4 is usual, 0 is off."""
    veto_high: float = pydantic.Field(default=0.0, ge=0)
    """A sample with a token whose ratio of trainer to engine is above this has weight 0; 100 is usual, 0 is off."""

    @pydantic.model_validator(mode="after")
    def _bounds_leave_tokens_of_the_policy_itself(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        if self.kind == "mask" and not self.low <= 1 <= self.high:
            raise ValueError(
                f"kind = 'mask' with low = {self.low} and high = {self.high} leaves out every token that engine and "
                "trainer agree on, whose ratio is 1; set low <= 1 <= high"
            )
        if self.veto_low >= 1 or 0 < self.veto_high <= 1:
            raise ValueError(
                f"veto_low = {self.veto_low} and veto_high = {self.veto_high} leave out every sample that engine and "
                "trainer agree on, whose ratios are 1; set veto_low < 1 < veto_high, or 0 for none"
            )
        return self


class RejectionConfig(Axis):
    """Leaves samples or tokens out of the policy gradient because the policy has moved away from them."""

    uses: ClassVar[Mapping[str, str]] = {"opsm": "max_drop", "geometric": "low high", "k3": "max_k3", "m2po": "max_m2"}

    kind: Literal["none", "opsm", "geometric", "k3", "m2po"] = "none"
    """With d the log ratio of trainer to engine: opsm: samples of negative advantage whose mean of -d is above
    `max_drop`. geometric: samples whose exp(mean d) is outside `low` to `high`. k3: samples whose mean of
    exp(d) - 1 - d is above `max_k3`. m2po: of the tokens that the advantage moves further from the engine, those with
    the largest d squared, until the mean over the rest is at most `max_m2`."""
    max_drop: float = pydantic.Field(default=0.5, ge=0)
    """Largest mean drop of log-probability, in nats (opsm)."""
    low: float = pydantic.Field(default=0.99, ge=0, lt=1)
    """Lower bound of the geometric mean of the ratios (geometric)."""
    high: float = pydantic.Field(default=1.01, gt=1)
    """Upper bound of the geometric mean of the ratios (geometric)."""
    max_k3: float = pydantic.Field(default=0.01, gt=0)
    """Largest estimate of a sample's KL divergence per token, in nats (k3)."""
    max_m2: float = pydantic.Field(default=0.04, gt=0)
    """Largest mean of d squared over the batch's tokens that move further from the engine (m2po)."""


class KlConfig(Axis):
    """A penalty on the distance to a reference policy, which is kept in memory beside the trained one."""

    uses: ClassVar[Mapping[str, str]] = {
        "k1_in_reward": "coef reference refresh refresh_every ema_weight",
        "k2": "coef unbiased reference refresh refresh_every ema_weight",
        "k3": "coef unbiased reference refresh refresh_every ema_weight",
        "k3_plus": "coef unbiased reference refresh refresh_every ema_weight",
    }

    kind: Literal["none", "k1_in_reward", "k2", "k3", "k3_plus"] = "none"
    """With d the log ratio to the reference: k1_in_reward: each token's d is subtracted from its reward. In the loss:
    k2: d^2 / 2. k3: exp(-d) + d - 1. k3_plus: the value of k3 with the gradient of k2."""
    coef: float = pydantic.Field(default=1e-3, gt=0)
    """Factor of the penalty."""
    unbiased: bool = False
    """Weight the penalty by the ratio to the engine, so that it estimates the policy's divergence on stale tokens
    too (k2, k3, k3_plus)."""
    reference: Annotated[ModelPath | None, UNSET_IF_EMPTY] = None
    """The reference, for example a teacher: a folder or a model on the Hugging Face Hub, as in model.path. It has the
    architecture, the sizes and the tokens of the trained model. Unset: the model that the run began with."""
    refresh: Literal["never", "copy", "ema"] = "never"
    """never: the reference stays what it was at the start. Every `refresh_every` steps, copy: it becomes the
    policy. ema: it moves towards the policy by `ema_weight`."""
    refresh_every: int = pydantic.Field(default=512, ge=1)
    """Optimizer steps between refreshes (copy, ema)."""
    ema_weight: float = pydantic.Field(default=0.6, gt=0, le=1)
    """Share of the policy in a refreshed reference (ema)."""

    @pydantic.model_validator(mode="after")
    def _refreshes_by_what_is_set(self) -> Self:
        if self.reference is not None and self.refresh != "never":
            raise ValueError(
                f"refresh = {self.refresh!r} would replace reference = {str(self.reference)!r} by the policy; leave "
                "one of them out"
            )
        for name, refreshes in (("refresh_every", ("copy", "ema")), ("ema_weight", ("ema",))):
            value, needed = getattr(self, name), " or ".join(map(repr, refreshes))
            if value != type(self).model_fields[name].default and self.refresh not in refreshes:
                raise ValueError(f"{name} = {value} has no effect with refresh = {self.refresh!r}; it is for {needed}")
        return self

    @pydantic.field_validator("kind", mode="before")
    @classmethod
    def _is_no_k1(cls, kind: Any) -> Any:
        if kind == "k1":
            raise ValueError("k1 in the loss has a gradient of zero on average; take k2, or k1_in_reward")
        return kind


class EntropyConfig(Axis):
    """A bonus for the entropy of the policy's distribution at its own tokens."""

    uses: ClassVar[Mapping[str, str]] = {"bonus": "coef", "target": "coef target adjustment"}

    kind: Literal["none", "bonus", "target"] = "none"
    """bonus: `coef` times the mean entropy. target: the coefficient rises by `adjustment` after each step below
    `target` and falls above it; above it there is no bonus (Skywork-OR1)."""
    coef: float = pydantic.Field(default=1e-3, ge=0)
    """Factor of the bonus, above 0; with target, its value at the first step, which may be 0."""
    target: float = pydantic.Field(default=0.2, gt=0)
    """Mean entropy per token, in nats (target)."""
    adjustment: float = pydantic.Field(default=0.005, gt=0)
    """Change of the coefficient per step (target)."""

    @pydantic.model_validator(mode="after")
    def _has_a_factor(self) -> Self:
        if self.kind == "bonus" and not self.coef:
            raise ValueError(
                f"coef = {self.coef} with kind = 'bonus' is no bonus; set coef above 0, or kind = 'none' for no bonus"
            )
        return self


class AggregationConfig(Axis):
    """How the loss averages over tokens. Denominators count every token of the batch."""

    uses: ClassVar[Mapping[str, str]] = {"constant": "length"}

    kind: Literal["token", "sequence", "prompt", "constant"] = "token"
    """token: the mean over all tokens of the optimizer batch. sequence: over samples, of each sample's mean. prompt:
    over groups, of each group's mean over its tokens. constant: over samples, of each sample's sum over `length`."""
    length: int = pydantic.Field(default=0, ge=0)
    """Divisor of a sample's sum, in tokens; usually sampling.max_new_tokens (constant)."""

    @pydantic.model_validator(mode="after")
    def _has_a_length(self) -> Self:
        if self.kind == "constant" and not self.length:
            raise ValueError("constant needs a length in tokens; usually sampling.max_new_tokens")
        return self
