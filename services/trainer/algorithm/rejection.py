"""The rejection: leaves samples or tokens that the policy has moved away from out of the policy gradient.

Legend: N = own tokens, L = leaving tokens. d = log ratio of trainer to engine, without gradient; A = advantage.

Invariant: a rejection multiplies by 0 and changes no denominator.
"""

import torch

from services.trainer.algorithm.axes import RejectionConfig
from services.trainer.algorithm.ratio import exp_ratio
from services.trainer.algorithm.tokens import sample_means


def rejected_tokens(
    log_ratio_N: torch.Tensor,
    advantages_N: torch.Tensor,
    sample_N: torch.Tensor,
    config: RejectionConfig,
    *,
    m2_threshold: float = float("inf"),
) -> torch.Tensor:
    """Return bool[N]: the tokens to leave out.

    opsm: samples with A < 0 and mean(-d) > max_drop (DeepSeek-V3.2, arXiv 2512.02556, off-policy sequence masking).
    geometric: samples with exp(mean d) outside low to high (verl, `rollout_corr_helper`, seq_mean_k1).
    k3: samples with mean(exp(d) - 1 - d) > max_k3 (verl, seq_mean_k3).
    m2po: tokens that A moves further from the engine, A d > 0, and whose d^2 is above the batch's threshold (Zheng et
        al. 2025, "Prosperity before Collapse", algorithm 1; its trust-region tokens are these in the authors' code).

    Args:
        log_ratio_N: d.
        advantages_N: A.
        sample_N: Sample of each token; except for m2po, all tokens of a sample must be present.
        config: Kind and bounds.
        m2_threshold: Threshold of the whole batch, from `m2_threshold`.
    """
    if config.kind == "none":
        return torch.zeros_like(log_ratio_N, dtype=torch.bool)
    if config.kind == "m2po":
        return is_leaving(log_ratio_N, advantages_N) & (log_ratio_N.square() > m2_threshold)
    if config.kind == "k3":
        return sample_means(exp_ratio(log_ratio_N) - 1 - log_ratio_N, sample_N) > config.max_k3
    mean_N = sample_means(log_ratio_N, sample_N)
    if config.kind == "opsm":
        return (advantages_N < 0) & (-mean_N > config.max_drop)
    geometric_N = exp_ratio(mean_N)
    return (geometric_N < config.low) | (geometric_N > config.high)


def is_leaving(log_ratio_N: torch.Tensor, advantages_N: torch.Tensor) -> torch.Tensor:
    """Return bool[N]: whether the policy has moved away from the engine at the token, and A would move it further."""
    return advantages_N * log_ratio_N > 0


def m2_threshold(log_ratio_N: torch.Tensor, advantages_N: torch.Tensor, max_m2: float) -> float:
    """Return the threshold on d^2 for kept tokens: the mean d^2 of the kept leaving tokens is at most `max_m2`.

    The largest values are rejected first, equal ones together. The threshold lies half-way between the largest kept and
    the smallest rejected value, so rounding in a later forward pass moves no token across it.

    Args:
        log_ratio_N: d of the whole batch; the threshold applies however the batch is cut.
        advantages_N: A of the same tokens.
        max_m2: Bound on the mean.
    """
    squares_L = log_ratio_N.double()[is_leaving(log_ratio_N, advantages_N)].square().sort().values
    means_L = squares_L.cumsum(0) / torch.arange(1, len(squares_L) + 1, dtype=torch.float64, device=squares_L.device)
    num_kept = int((means_L <= max_m2).sum())  # means of ascending values ascend
    if num_kept == len(squares_L):
        return float("inf")
    smallest_rejected = squares_L[num_kept]
    kept_L = squares_L[squares_L < smallest_rejected]
    largest_kept = float(kept_L[-1]) if len(kept_L) else 0.0
    return (largest_kept + float(smallest_rejected)) / 2
