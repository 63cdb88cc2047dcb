"""The GRPO loss with importance correction for stale tokens.

Legend: N = the policy's own tokens of a micro-batch, sample by sample; no other token enters the loss.

logp is the policy's logprob of a token, logp_old = sg(logp) the same without gradient, logp_engine the logprob that the
engine reported when it sampled the token, A the advantage of its sample, sg() a stopped gradient:

    tis  (decoupled)  r = exp(logp - logp_old)             w = min(exp(logp_old - logp_engine), cap)
    ppo  (direct)     r = exp(logp - logp_engine)          w = 1

    loss = - sum_t weight_t * w_t * min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

The surrogate is PPO's (Schulman et al. 2017, eq. 7) with DAPO's two bounds (Yu et al. 2025, Clip-Higher). `tis` is
truncated importance sampling between trainer and engine (Yao et al. 2025, "Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training"), which with stale engines is also AReaL's decoupled objective (Fu et al. 2025,
section 5.2) with pi_prox = the policy at the start of the step. With one optimizer step per version, pi_prox is the
policy itself: r is 1 in value, the clip has no effect, and the gradient is w A grad logp. `ppo` clips against the
engine instead, so tokens that moved too far have no gradient.

`weight_t` comes from `token_weights`, which sees the whole optimizer batch. Invariant: the losses of the micro-batches
add up to the loss of the batch, however it is cut.
"""

from typing import Literal

import numpy as np
import torch

from services.trainer.config import LossConfig

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this before exp(). A token beyond it counts as a constant, without gradient."""


def token_weights(num_tokens_G: np.ndarray, aggregation: Literal["token_mean", "sequence_mean"]) -> np.ndarray:
    """Return float64[G]: the weight in the loss of each token of each sample; over all tokens they sum to 1.

    token_mean: 1 / tokens of the batch. sequence_mean: 1 / (samples * tokens of the sample).

    Args:
        num_tokens_G: The policy's own tokens of each sample of the whole optimizer batch, at least 1. Samples without
            gradient count too, so the scale of the loss does not depend on their number.
        aggregation: token_mean or sequence_mean.
    """
    counts = np.asarray(num_tokens_G, dtype=np.float64)
    if aggregation == "token_mean":
        return np.full_like(counts, 1.0 / counts.sum())
    return 1.0 / (len(counts) * counts)


def policy_loss(
    logprobs_N: torch.Tensor,
    engine_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    weights_N: torch.Tensor,
    config: LossConfig,
) -> torch.Tensor:
    """Return the scalar loss of a micro-batch: its share of the loss of the optimizer batch.

    Args:
        logprobs_N: Current policy, float32, with gradient.
        engine_logprobs_N: Reported by the engine, at the same temperature.
        advantages_N: Advantage of each token's sample.
        weights_N: Weight of each token, from `token_weights`.
        config: The correction and its bounds.
    """
    if config.importance == "tis":
        old = logprobs_N.detach()
        ratio = _exp(logprobs_N - old)
        correction = _exp(old - engine_logprobs_N).clamp(max=config.tis_cap)
    else:
        ratio = _exp(logprobs_N - engine_logprobs_N)
        correction = torch.ones_like(ratio)
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    surrogate = torch.minimum(ratio * advantages_N, clipped * advantages_N)
    return -(weights_N * correction * surrogate).sum()


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
