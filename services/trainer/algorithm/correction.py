"""The correction: importance weights for tokens that the engine sampled with other probabilities than the anchor's.

Legend: N = own tokens.
"""

import torch

from services.trainer.algorithm.config import CorrectionConfig
from services.trainer.algorithm.ratio import exp_ratio


def correction_weights(
    anchor_N: torch.Tensor, engine_logprobs_N: torch.Tensor, config: CorrectionConfig
) -> torch.Tensor:
    """Return the weight of each token, without gradient.

    With w = exp(anchor - engine):

    none: 1.
    truncate: min(w, high) (Yao et al. 2025; with stale engines also Fu et al. 2025, "AReaL", section 5.2).
    """
    if config.kind == "none":
        return torch.ones_like(engine_logprobs_N)
    return exp_ratio(anchor_N - engine_logprobs_N).clamp(max=config.high)
