"""The trust region: what a token adds to the objective, and where its gradient ends.

Legend: N = own tokens. r = ratio of the policy to the anchor, A = advantage; the objective is maximised.
"""

from dataclasses import dataclass

import torch

from services.trainer.algorithm.config import TrustRegionConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surrogate:
    """The objective of each token."""

    objective_N: torch.Tensor
    """With gradient."""
    outside_N: torch.Tensor
    """bool: the trust region leaves the token without gradient."""


def surrogate(ratio_N: torch.Tensor, advantages_N: torch.Tensor, config: TrustRegionConfig) -> Surrogate:
    """Return the objective of each token.

    none: r A.
    clip: min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (Schulman et al. 2017, eq. 7; two bounds as in Yu et al.
        2025, "DAPO", section 3.1).
    """
    if config.kind == "none":
        return Surrogate(objective_N=ratio_N * advantages_N, outside_N=torch.zeros_like(ratio_N, dtype=torch.bool))
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    objective_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    outside_N = ((advantages_N > 0) & (ratio_N > high)) | ((advantages_N < 0) & (ratio_N < low))
    return Surrogate(objective_N=objective_N, outside_N=outside_N)
