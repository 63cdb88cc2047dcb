"""The trust region: a token's contribution to the objective, and the point beyond which it has no gradient.

Legend: N = own tokens. r = ratio of the policy to the anchor, A = advantage, p = exp(logp), q = exp(anchor), sg() = a
stopped gradient. The objective is maximised.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.errors import DataError
from services.trainer.algorithm.axes import TrustRegionConfig
from services.trainer.algorithm.plugin import load_function

_EPS = 1e-8
"""Smallest probability in a logarithm of the binary KL divergence, as in verl."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """The policy and the anchor at each token, with advantages."""

    ratio_N: torch.Tensor
    """The ratio r of the token or of its sample, with gradient."""
    logprobs_N: torch.Tensor
    """Current policy, with gradient."""
    anchor_N: torch.Tensor
    advantages_N: torch.Tensor
    sample_N: torch.Tensor
    """Sample of each token; all tokens of a sample are present."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surrogate:
    """The objective of each token, and the effect of the trust region on it."""

    objective_N: torch.Tensor
    """The objective, to be maximised, with gradient."""
    bounded_N: torch.Tensor
    """bool: whether the trust region changed the token's objective."""
    outside_N: torch.Tensor
    """bool: whether the trust region removed the token's gradient."""


TrustRegion = Callable[[Step, TrustRegionConfig], Surrogate]


def unbounded(step: Step, _config: TrustRegionConfig) -> Surrogate:
    """Return r A."""
    nowhere_N = torch.zeros_like(step.advantages_N, dtype=torch.bool)
    return Surrogate(objective_N=step.ratio_N * step.advantages_N, bounded_N=nowhere_N, outside_N=nowhere_N)


def clip(step: Step, config: TrustRegionConfig) -> Surrogate:
    """Return min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); with `dual` and A < 0, at least dual A.

    Schulman et al. 2017, eq. 7; two bounds: Yu et al. 2025, "DAPO", section 3.1; dual: Ye et al. 2020, "Mastering
    Complex Control in MOBA Games with Deep Reinforcement Learning", eq. 8.
    """
    ratio_N, advantages_N = step.ratio_N, step.advantages_N
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    objective_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    outside_N = ((advantages_N > 0) & (ratio_N > high)) | ((advantages_N < 0) & (ratio_N < low))
    if config.dual:
        too_far_N = (advantages_N < 0) & (ratio_N > config.dual)
        objective_N = torch.where(too_far_N, config.dual * advantages_N, objective_N)
        outside_N = outside_N | too_far_N
    return Surrogate(objective_N=objective_N, bounded_N=outside_N, outside_N=outside_N)


def cispo(step: Step, config: TrustRegionConfig) -> Surrogate:
    """Return sg(clip(r, ratio_low, ratio_high)) A logp (MiniMax 2025, "MiniMax-M1", eq. 4, with absolute bounds)."""
    ratio_N = step.ratio_N.detach()
    weight_N = ratio_N.clamp(config.ratio_low, config.ratio_high)
    return Surrogate(
        objective_N=weight_N * step.advantages_N * step.logprobs_N,
        bounded_N=(weight_N != ratio_N) & (step.advantages_N != 0),
        outside_N=weight_N == 0,
    )


def dppo_tv(step: Step, config: TrustRegionConfig) -> Surrogate:
    """Return r A; drop tokens with A > 0 and p - q > tv_high, or A < 0 and p - q < -tv_low.

    "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879), total variation; prime-rl's default.
    """
    moved_N = step.logprobs_N.detach().exp() - step.anchor_N.exp()
    advantages_N = step.advantages_N
    dropped_N = (advantages_N > 0) & (moved_N > config.tv_high) | (advantages_N < 0) & (moved_N < -config.tv_low)
    return _without(dropped_N, step, config)


def dppo_kl(step: Step, config: TrustRegionConfig) -> Surrogate:
    """Return r A; drop tokens that A moves away from the anchor beyond a binary KL divergence of kl_max.

    The divergence is q log(q / p) + (1 - q) log((1 - q) / (1 - p)), of the token against all others (arXiv 2602.04879).
    """
    p_N, q_N = step.logprobs_N.detach().double().exp(), step.anchor_N.double().exp()
    other_p_N, other_q_N = (1 - p_N).clamp(min=_EPS), (1 - q_N).clamp(min=_EPS)
    divergence_N = q_N * (q_N.clamp(min=_EPS) / p_N.clamp(min=_EPS)).log() + other_q_N * (other_q_N / other_p_N).log()
    outward_N = step.advantages_N * (p_N - q_N) > 0
    return _without(outward_N & (divergence_N > config.kl_max), step, config)


def _without(dropped_N: torch.Tensor, step: Step, config: TrustRegionConfig) -> Surrogate:
    """Return r A, or sg(min(r, cap)) A logp, without the dropped tokens."""
    objective_N = step.ratio_N * step.advantages_N
    if config.cap:
        objective_N = step.ratio_N.detach().clamp(max=config.cap) * step.advantages_N * step.logprobs_N
    return Surrogate(objective_N=objective_N * ~dropped_N, bounded_N=dropped_N, outside_N=dropped_N)


def _custom(step: Step, config: TrustRegionConfig) -> Surrogate:
    function = load_function(config.function, "algorithm.trust_region.function")
    surrogate = function(step, **config.options)
    if not isinstance(surrogate, Surrogate):
        raise DataError(
            f"algorithm.trust_region.function = {config.function!r} returned a {type(surrogate).__name__}, not a "
            "Surrogate; see examples/algorithm/own_axes.py"
        )
    for name, values_N in (
        ("objective_N", surrogate.objective_N),
        ("bounded_N", surrogate.bounded_N),
        ("outside_N", surrogate.outside_N),
    ):
        if values_N.shape != step.ratio_N.shape:
            raise DataError(
                f"algorithm.trust_region.function = {config.function!r} returned {name} of shape "
                f"{tuple(values_N.shape)} for {len(step.ratio_N)} tokens; it must return one value a token"
            )
    return surrogate


_KINDS: dict[str, TrustRegion] = {
    "none": unbounded,
    "clip": clip,
    "cispo": cispo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "custom": _custom,
}


def ratio_has_gradient(config: TrustRegionConfig) -> bool:
    """Return whether the objective's gradient is that of the ratio; a custom objective is taken to have its own."""
    return config.kind in ("none", "clip") or (config.kind in ("dppo_tv", "dppo_kl") and not config.cap)


def surrogate(step: Step, config: TrustRegionConfig) -> Surrogate:
    """Return the objective of each token."""
    return _KINDS[config.kind](step, config)
