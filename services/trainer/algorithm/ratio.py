"""Ratios of probabilities, computed from log-probabilities without overflow.

Legend: N = own tokens.
"""

import torch

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this before exp(). A token beyond it counts as a constant, without gradient."""


def exp_ratio(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """Return the ratio of which the argument is the logarithm: positive and finite."""
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
