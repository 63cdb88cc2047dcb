"""The aggregation: what each token weighs in the loss.

Legend: G = samples of the optimizer batch.

Invariant: weights follow from the counts of tokens of the whole optimizer batch, before any mask or rejection. So the
losses of micro-batches add up to the loss of the batch however it is cut, and rejected tokens do not make others
heavier.
"""

import numpy as np

from services.trainer.algorithm.axes import AggregationConfig


def token_weights(num_tokens_G: np.ndarray, group_G: np.ndarray, config: AggregationConfig) -> np.ndarray:
    """Return float64[G]: the weight in the loss of each token of each sample.

    token:    1 / tokens of the batch (Yu et al. 2025, "DAPO", eq. 8).
    sequence: 1 / (samples * tokens of the sample) (Shao et al. 2024, "DeepSeekMath", eq. 3).
    prompt:   1 / (groups * tokens of the group) (Khatri et al. 2025, ScaleRL, arXiv 2510.13786).
    constant: 1 / (samples * length) (Liu et al. 2025, "Understanding R1-Zero-Like Training").

    All but constant sum to 1 over the tokens of the batch.

    Args:
        num_tokens_G: The policy's own tokens of each sample of the whole optimizer batch, at least 1. Samples without
            gradient count too, so the scale of the loss does not depend on their number.
        group_G: Group of each sample: any integers, in any order.
        config: Kind, and the length of constant.
    """
    counts_G = np.asarray(num_tokens_G, dtype=np.float64)
    if config.kind == "token":
        return np.full_like(counts_G, 1.0 / counts_G.sum())
    if config.kind == "constant":
        return np.full_like(counts_G, 1.0 / (len(counts_G) * config.length))
    if config.kind == "prompt":
        _, number_G = np.unique(group_G, return_inverse=True)
        tokens_of_group = np.bincount(number_G, weights=counts_G)
        return 1.0 / (len(tokens_of_group) * tokens_of_group[number_G])
    return 1.0 / (len(counts_G) * counts_G)
