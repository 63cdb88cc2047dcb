"""Metrics of the samples of an optimizer step: rewards, lengths, staleness.

Legend: G = samples of the batch.
"""

from collections.abc import Sequence

import numpy as np


def batch_stats(
    rewards: Sequence[Sequence[float]], num_tokens_G: np.ndarray, staleness: Sequence[int]
) -> dict[str, float]:
    """Return metrics of the batch by name.

    Args:
        rewards: Group by group; NaN for a sample that was not judged, which counts in no reward.
        num_tokens_G: The policy's own tokens of each sample.
        staleness: Of each group: published version minus the version of its oldest token.
    """
    rewards_G = np.array([reward for group in rewards for reward in group], dtype=np.float64)
    judged = rewards_G[np.isfinite(rewards_G)]
    return {
        "reward_mean": float(judged.mean()) if len(judged) else 0.0,
        "reward_std": float(judged.std()) if len(judged) else 0.0,
        "num_groups": float(len(rewards)),
        "num_samples": float(len(rewards_G)),
        "sample_tokens_mean": float(np.mean(num_tokens_G)),
        "sample_tokens_max": float(np.max(num_tokens_G)),
        "staleness_mean": float(np.mean(staleness)),
        "staleness_max": float(np.max(staleness)),
    }
