"""The loss of a micro-batch, composed of the axes.

Legend: N = the policy's own tokens of a micro-batch, sample by sample; no other token enters the loss.

    r_t    = exp(logp_t - anchor_t)                            anchor.py
    o_t    = what the trust region makes of r_t A              trust_region.py
    w_t    = weight of the anchor against the engine           correction.py
    loss   = - sum_t weight_t w_t o_t                          weight_t: aggregation.py, A: advantage.py

The loss knows tokens and samples only, not how rows were cut, padded or packed. Invariant: the losses of the
micro-batches add up to the loss of the batch, however it is cut.
"""

from dataclasses import dataclass

import torch

from services.trainer.algorithm.anchor import anchor_logprobs
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.correction import correction_weights
from services.trainer.algorithm.ratio import exp_ratio
from services.trainer.algorithm.tokens import Samples, Tokens
from services.trainer.algorithm.trust_region import surrogate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loss:
    """The loss, and what the axes did to each token."""

    value: torch.Tensor
    """Scalar: the micro-batch's share of the loss of the optimizer batch."""
    outside_N: torch.Tensor
    """bool: without gradient by the trust region."""
    correction_N: torch.Tensor
    """Importance weight."""


def policy_loss(tokens: Tokens, samples: Samples, config: AlgorithmConfig) -> Loss:
    """Return the loss of a micro-batch: its share of the loss of the optimizer batch.

    Args:
        tokens: Of the micro-batch.
        samples: Of the optimizer batch.
        config: The axes.
    """
    advantages_N = samples.advantages_G[tokens.sample_N]
    weights_N = samples.weights_G[tokens.sample_N]
    anchor_N = anchor_logprobs(tokens.logprobs_N, tokens.engine_logprobs_N, kind=config.anchor)
    correction_N = correction_weights(anchor_N, tokens.engine_logprobs_N, config.correction)
    ratio_N = exp_ratio(tokens.logprobs_N - anchor_N)
    region = surrogate(ratio_N, advantages_N, config.trust_region)
    value = -(weights_N * correction_N * region.objective_N).sum()
    return Loss(value=value, outside_N=region.outside_N, correction_N=correction_N)
