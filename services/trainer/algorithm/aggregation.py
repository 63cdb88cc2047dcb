"""The aggregation: the weight of each token in the loss.

Legend: G = samples of the optimizer batch.

Invariant: weights depend on the token counts of the whole optimizer batch, before any mask or rejection. So the losses
of micro-batches add up to the loss of the batch however it is cut, and rejected tokens do not make others heavier.

A weight is 1 / (divisor * denominator). The divisor depends only on the sample's group. The denominator is one number
for the batch and adds up over its groups. So the gradient of a batch whose last groups have not arrived can be summed
with any denominator and rescaled at the end.
"""

import numpy as np

from services.trainer.algorithm.axes import AggregationConfig


def token_weights(
    num_tokens_G: np.ndarray, group_G: np.ndarray, config: AggregationConfig, *, denominator: float | None = None
) -> np.ndarray:
    """Return float64[G]: the weight in the loss of each token of each sample.

    token:    1 / tokens of the batch (Yu et al. 2025, "DAPO", eq. 8).
    sequence: 1 / (samples * tokens of the sample) (Shao et al. 2024, "DeepSeekMath", eq. 3).
    prompt:   1 / (groups * tokens of the group) (Khatri et al. 2025, ScaleRL, arXiv 2510.13786).
    constant: 1 / (samples * length) (Liu et al. 2025, "Understanding R1-Zero-Like Training").

    Except for constant, the weights sum to 1 over the tokens of the batch.

    Args:
        num_tokens_G: The policy's own tokens of each sample of the whole optimizer batch, at least 1. Samples without
            gradient count too, so the scale of the loss does not depend on their number.
        group_G: Group of each sample: any integers, in any order.
        config: Kind, and the length of constant.
        denominator: Replaces `batch_denominator` of these samples if they are only a part of the batch.
    """
    if denominator is None:
        denominator = batch_denominator(num_tokens_G, group_G, config)
    return 1.0 / (denominator * _divisors(np.asarray(num_tokens_G, dtype=np.float64), group_G, config))


def batch_denominator(num_tokens_G: np.ndarray, group_G: np.ndarray, config: AggregationConfig) -> float:
    """Return the factor that all weights of a batch share: its number of tokens, samples or groups.

    It is the sum of the denominators of the batch's parts, if no group is cut.
    """
    if config.kind == "token":
        return float(np.sum(num_tokens_G))
    if config.kind == "prompt":
        return float(len(np.unique(group_G)))
    return float(len(num_tokens_G))


def _divisors(counts_G: np.ndarray, group_G: np.ndarray, config: AggregationConfig) -> np.ndarray:
    if config.kind == "token":
        return np.ones_like(counts_G)
    if config.kind == "constant":
        return np.full_like(counts_G, config.length)
    if config.kind == "prompt":
        _, number_G = np.unique(group_G, return_inverse=True)
        tokens_of_group: np.ndarray = np.bincount(number_G, weights=counts_G)
        return tokens_of_group[number_G]
    return counts_G
