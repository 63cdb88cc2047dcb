"""Group advantages of GRPO.

Legend: G = samples of the batch.

Invariant: equal rewards have advantage exactly 0. All is computed in float64: in float32, eight rewards of 0.9 do not
average to 0.9, and dividing the difference by a vanishing standard deviation makes a gradient of it.
"""

from typing import Literal

import numpy as np

STD_EPS = 1e-6
"""Added to the standard deviation, as verl does."""


def group_advantages(
    rewards_G: np.ndarray, groups_G: np.ndarray, *, kind: Literal["grpo", "dr_grpo"] = "grpo"
) -> np.ndarray:
    """Return float64[G]: how much better each sample is than its group.

    grpo:    A = (r - mean) / (std + 1e-6), std with n - 1 in its denominator (Shao et al. 2024, section 4.1.2; as verl)
    dr_grpo: A = r - mean (Liu et al. 2025, "Understanding R1-Zero-Like Training")

    Args:
        rewards_G: NaN for a sample that was not judged: its advantage is 0 and it does not count in the group's mean.
        groups_G: Group of each sample: any integers, in any order.
        kind: grpo or dr_grpo.

    Raises:
        ValueError: the shapes differ, or a reward is infinite.
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    groups_G = np.asarray(groups_G)
    if rewards_G.ndim != 1 or rewards_G.shape != groups_G.shape:
        raise ValueError(
            f"rewards {rewards_G.shape} and groups {groups_G.shape} must be two vectors of the same length"
        )
    if np.isinf(rewards_G).any():
        raise ValueError("a reward is infinite")
    is_judged_G = ~np.isnan(rewards_G)
    advantages_G = np.zeros_like(rewards_G)
    for group in np.unique(groups_G[is_judged_G]):
        members = (groups_G == group) & is_judged_G
        rewards = rewards_G[members]
        if rewards.max() == rewards.min():
            continue
        centered = rewards - rewards.mean()
        advantages_G[members] = centered / (rewards.std(ddof=1) + STD_EPS) if kind == "grpo" else centered
    return advantages_G
