"""The anchor: the log-probabilities that the ratio of the trust region is taken against.

Legend: N = own tokens.

With one optimizer step per version the proximal policy, which PPO calls old, is the policy itself. Its logprobs
are those of the forward pass without gradient, and cost nothing. The ratio is then 1 in value: it has a gradient, but a
clip has no effect. What bounds stale tokens is the correction.
"""

from typing import Literal

import torch


def anchor_logprobs(
    logprobs_N: torch.Tensor, engine_logprobs_N: torch.Tensor, *, kind: Literal["rollout", "proximal"]
) -> torch.Tensor:
    """Return [N], without gradient.

    Args:
        logprobs_N: Current policy.
        engine_logprobs_N: Reported by the engine.
        kind: `rollout` or `proximal`.
    """
    return engine_logprobs_N if kind == "rollout" else logprobs_N.detach()
