"""The rejection: samples or tokens that the policy has moved away from are left out of the policy gradient.

Legend: N = own tokens. d = log ratio of trainer to engine, without gradient; A = advantage.

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
    m2po: tokens with d^2 above the batch's threshold (Zheng et al. 2025, "Prosperity before Collapse").

    Args:
        log_ratio_N: d.
        advantages_N: A.
        sample_N: Sample of each token; but for m2po, all tokens of a sample must be there.
        config: Kind and bounds.
        m2_threshold: Of the whole batch, from `m2_threshold`.
    """
    if config.kind == "none":
        return torch.zeros_like(log_ratio_N, dtype=torch.bool)
    if config.kind == "m2po":
        return log_ratio_N.square() > m2_threshold
    if config.kind == "k3":
        return sample_means(exp_ratio(log_ratio_N) - 1 - log_ratio_N, sample_N) > config.max_k3
    mean_N = sample_means(log_ratio_N, sample_N)
    if config.kind == "opsm":
        return (advantages_N < 0) & (-mean_N > config.max_drop)
    geometric_N = exp_ratio(mean_N)
    return (geometric_N < config.low) | (geometric_N > config.high)


def m2_threshold(log_ratio_N: torch.Tensor, max_m2: float) -> float:
    """Return the d^2 up to which tokens are kept so that the mean of theirs is below `max_m2`.

    The largest go first, equal ones together, and at least the smallest stay. The threshold lies half-way to the
    smallest that goes, so rounding of a later forward pass moves no token across it.

    Args:
        log_ratio_N: d of the whole batch, on any cut of which the threshold then holds.
        max_m2: The bound.
    """
    squares_N = log_ratio_N.double().square().sort().values
    means_N = squares_N.cumsum(0) / torch.arange(1, len(squares_N) + 1, dtype=torch.float64, device=squares_N.device)
    num_kept = max(1, int((means_N < max_m2).sum()))  # means of ascending values ascend
    if num_kept == len(squares_N):
        return float("inf")
    kept_N = squares_N < squares_N[num_kept]
    if not kept_N.any():
        kept_N = squares_N == squares_N[0]
    if kept_N.all():
        return float("inf")
    return float((squares_N[kept_N].max() + squares_N[~kept_N].min()) / 2)
