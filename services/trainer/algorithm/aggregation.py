"""The aggregation: what each token weighs in the loss.

Legend: G = samples of the optimizer batch.

Invariant: weights follow from the counts of tokens of the whole optimizer batch, before any mask or rejection. So the
losses of micro-batches add up to the loss of the batch however it is cut, and rejected tokens do not make others
heavier.
"""

from typing import Literal

import numpy as np


def token_weights(num_tokens_G: np.ndarray, *, kind: Literal["token", "sequence"]) -> np.ndarray:
    """Return float64[G]: the weight in the loss of each token of each sample; over all tokens they sum to 1.

    token: 1 / tokens of the batch. sequence: 1 / (samples * tokens of the sample).

    Args:
        num_tokens_G: The policy's own tokens of each sample of the whole optimizer batch, at least 1. Samples without
            gradient count too, so the scale of the loss does not depend on their number.
        kind: token or sequence.
    """
    counts = np.asarray(num_tokens_G, dtype=np.float64)
    if kind == "token":
        return np.full_like(counts, 1.0 / counts.sum())
    return 1.0 / (len(counts) * counts)
