"""The correction: importance weights for tokens that the engine sampled with probabilities other than the anchor's.

Legend: N = own tokens. w = ratio of the anchor to the engine.

Invariant: a weight never changes a denominator. A token of weight 0 counts like any other.
"""

from dataclasses import dataclass

import torch

from services.trainer.algorithm.axes import CorrectionConfig
from services.trainer.algorithm.ratio import exp_ratio
from services.trainer.algorithm.tokens import sample_any, sample_means, sample_sums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """Importance weights, without gradient."""

    weights_N: torch.Tensor
    bounded_N: torch.Tensor
    """bool: whether a bound changed the weight."""
    vetoed_N: torch.Tensor
    """bool: whether the token's sample has weight 0 because of the ratio of one of its tokens."""


def correction_weights(
    anchor_N: torch.Tensor,
    logprobs_N: torch.Tensor,
    engine_logprobs_N: torch.Tensor,
    sample_N: torch.Tensor,
    config: CorrectionConfig,
    *,
    mean_weight: float = 1.0,
) -> Correction:
    """Return the weight of each token.

    level token: w = exp(anchor - engine). sequence: exp of its sum over the sample. geometric: exp of its mean.

    none: 1.
    truncate: min(w, high) (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training").
    mask: w, or 0 where it is outside low to high (Ring-1T's IcePop, arXiv 2510.18855, and AReaL's decoupled objective).
    clip: w within low to high.
    veto: 0 for samples with a token whose ratio of trainer to engine is outside veto_low to veto_high.

    Args:
        anchor_N: From `anchor.anchor_logprobs`.
        logprobs_N: Current policy, which a veto compares with the engine.
        engine_logprobs_N: Reported by the engine.
        sample_N: Sample of each token; at any level but token, all tokens of a sample must be present.
        config: Kind, level and bounds.
        mean_weight: Mean weight of the whole batch (`statistics.BatchStatistics`), to divide by.
    """
    weights_N = torch.ones_like(engine_logprobs_N)
    bounded_N = torch.zeros_like(weights_N, dtype=torch.bool)
    if config.kind != "none":
        raw_N = exp_ratio(_log_ratio(anchor_N - engine_logprobs_N, sample_N, config))
        if config.kind == "truncate":
            weights_N = raw_N.clamp(max=config.high)
        elif config.kind == "clip":
            weights_N = raw_N.clamp(config.low, config.high)
        else:
            weights_N = torch.where((raw_N >= config.low) & (raw_N <= config.high), raw_N, 0.0)
        bounded_N = weights_N != raw_N
    vetoed_N = torch.zeros_like(bounded_N)
    if config.veto_low or config.veto_high:
        ratio_N = exp_ratio(logprobs_N.detach() - engine_logprobs_N)
        far_N = ratio_N < config.veto_low
        if config.veto_high:
            far_N = far_N | (ratio_N > config.veto_high)
        vetoed_N = sample_any(far_N, sample_N)
        weights_N = weights_N * ~vetoed_N
    if config.normalize:
        weights_N = weights_N / mean_weight
    return Correction(weights_N=weights_N, bounded_N=bounded_N, vetoed_N=vetoed_N)


def _log_ratio(log_ratio_N: torch.Tensor, sample_N: torch.Tensor, config: CorrectionConfig) -> torch.Tensor:
    if config.level == "token":
        return log_ratio_N
    reduced = sample_sums if config.level == "sequence" else sample_means
    return reduced(log_ratio_N, sample_N).to(log_ratio_N.dtype)
