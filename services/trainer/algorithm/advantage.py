"""Group advantages of GRPO.

Legend: N = samples of the batch.

Invariant: equal rewards have advantage exactly 0. All is computed in float64: in float32, eight rewards of 0.9 do not
average to 0.9, and dividing the difference by a vanishing standard deviation makes a gradient of it.
"""

from typing import Literal

import numpy as np

STD_EPS = 1e-6
"""Added to the standard deviation, as verl does."""


def group_advantages(
    rewards_N: np.ndarray, groups_N: np.ndarray, *, kind: Literal["grpo", "dr_grpo"] = "grpo"
) -> np.ndarray:
    """Return float64[N]: how much better each sample is than its group.

    grpo:    A = (r - mean) / (std + 1e-6), std with n - 1 in its denominator (Shao et al. 2024, section 4.1.2; as verl)
    dr_grpo: A = r - mean (Liu et al. 2025, "Understanding R1-Zero-Like Training")

    Args:
        rewards_N: NaN for a sample that was not judged: its advantage is 0 and it does not count in the group's mean.
        groups_N: Group of each sample: any integers, in any order.
        kind: grpo or dr_grpo.

    Raises:
        ValueError: the shapes differ, or a reward is infinite.
    """
    rewards_N = np.asarray(rewards_N, dtype=np.float64)
    groups_N = np.asarray(groups_N)
    if rewards_N.ndim != 1 or rewards_N.shape != groups_N.shape:
        raise ValueError(
            f"rewards {rewards_N.shape} and groups {groups_N.shape} must be two vectors of the same length"
        )
    if np.isinf(rewards_N).any():
        raise ValueError("a reward is infinite")
    is_judged_N = ~np.isnan(rewards_N)
    advantages_N = np.zeros_like(rewards_N)
    for group in np.unique(groups_N[is_judged_N]):
        members = (groups_N == group) & is_judged_N
        rewards = rewards_N[members]
        if rewards.max() == rewards.min():
            continue
        centered = rewards - rewards.mean()
        advantages_N[members] = centered / (rewards.std(ddof=1) + STD_EPS) if kind == "grpo" else centered
    return advantages_N
