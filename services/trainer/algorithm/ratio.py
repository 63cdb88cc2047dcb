"""Ratios of probabilities: of each token, or of a whole sample.

Legend: N = own tokens.
"""

from typing import Literal

import torch

from services.trainer.algorithm.tokens import sample_means

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this before exp(). The ratio of a token beyond it is a constant, without gradient."""


def exp_ratio(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """Return exp() of a clamped log ratio: positive and finite."""
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def is_clamped(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """Return bool[N]: whether `exp_ratio` is a constant there."""
    return log_ratio_N.detach().abs() > MAX_LOG_RATIO


def policy_log_ratio(
    logprobs_N: torch.Tensor, anchor_N: torch.Tensor, sample_N: torch.Tensor, *, level: Literal["token", "sequence"]
) -> torch.Tensor:
    """Return the log ratio of policy to anchor, with gradient.

    token: logp - anchor.
    sequence: the mean of logp - anchor over the sample in value, for each of its tokens. Each token has the gradient
        of its own log-probability, so that the mean over the sample's tokens has the gradient of the sequence's ratio
        (Zheng et al. 2025, "Group Sequence Policy Optimization", section 4.3).

    Args:
        logprobs_N: Current policy, with gradient.
        anchor_N: From `anchor.anchor_logprobs`.
        sample_N: Sample of each token; at level sequence all tokens of a sample must be present.
        level: token or sequence.
    """
    log_ratio_N = logprobs_N - anchor_N
    if level == "sequence":
        mean_N = sample_means(log_ratio_N.detach(), sample_N).to(logprobs_N.dtype)
        log_ratio_N = logprobs_N - logprobs_N.detach() + mean_N
    return log_ratio_N
