"""The advantage: how much better each sample is than others.

Legend: G = samples of the batch, N = own tokens of the batch.

Everything is computed in float64: in float32, eight rewards of 0.9 do not average to 0.9, and dividing the difference
by a vanishing standard deviation turns it into a gradient. Invariants:

- A sample that was not judged (NaN) has advantage 0 and counts in no mean.
- A masked sample has advantage 0. Its reward still counts in its group's mean, because it says how hard the prompt is;
  statistics of the batch cover only samples that are judged and not masked.
- A group of equal rewards, or of one sample, has advantage exactly 0 under every estimator that compares the samples of
  a group, and keeps it when the batch is normalised: it says nothing about which of its samples is better.
- reinforce_pp has no groups. Its baseline is the batch's mean, so a group of equal rewards has the advantage of its
  reward against the batch. It is exactly 0 if all rewards of the batch are equal, and in a batch of one sample.
"""

import numpy as np

from penstock.errors import DataError
from services.trainer.algorithm.axes import AdvantageConfig, LengthPenaltyConfig
from services.trainer.algorithm.plugin import load_function

STD_EPS = 1e-6
"""Added to a group's standard deviation, as in verl and slime."""
VARIANCE_EPS = 1e-8
"""Added to the batch's variance, as in verl and SkyRL."""


def sample_advantages(
    rewards_G: np.ndarray,
    group_G: np.ndarray,
    num_tokens_G: np.ndarray,
    config: AdvantageConfig,
    *,
    masked_G: np.ndarray | None = None,
    is_whitened: bool = True,
) -> np.ndarray:
    """Return float64[G]: how much better each sample is than others, after its length penalty.

    grpo:    A = (r - mean) / (std + 1e-6), std with n - 1 (Shao et al. 2024, "DeepSeekMath", section 4.1.2; as verl)
    dr_grpo: A = r - mean (Liu et al. 2025, "Understanding R1-Zero-Like Training")
    rloo:    A = r - mean of the others = n / (n - 1) (r - mean) (Ahmadian et al. 2024, "Back to Basics")
    maxrl:   A = (r - mean) / mean, 0 where the mean is 0 ("Maximum Likelihood Reinforcement Learning")
    reinforce_pp: A = r, whitened (Hu et al. 2025, "REINFORCE++")
    reinforce_pp_baseline: A = r - mean, whitened (the same, section 3.2)

    The mean is the group's. Whitened: minus the mean over the tokens of the batch, divided by their standard deviation.
    norm = "batch" whitens any of them; "batch_std" only divides, by the standard deviation over the samples
    (Khatri et al. 2025, "The Art of Scaling RL Compute for LLMs").

    Args:
        rewards_G: NaN for a sample that was not judged.
        group_G: Group of each sample: any integers, in any order.
        num_tokens_G: Own tokens of each sample, which whitening and length penalties count.
        config: The estimator.
        masked_G: bool: samples without gradient; None masks none.
        is_whitened: False leaves out the whitening, for token returns that are whitened later (`returns`).

    Raises:
        ValueError: the shapes differ, or a reward is infinite.
        DataError: the estimator cannot work with these rewards.
    """
    rewards_G, group_G = np.asarray(rewards_G, dtype=np.float64), np.asarray(group_G)
    if rewards_G.ndim != 1 or rewards_G.shape != group_G.shape:
        raise ValueError(f"rewards {rewards_G.shape} and groups {group_G.shape} must be two vectors of the same length")
    if np.isinf(rewards_G).any():
        raise ValueError(f"rewards must be finite, or NaN where nobody judged, not {rewards_G[np.isinf(rewards_G)][0]}")
    judged_G = ~np.isnan(rewards_G)
    eligible_G = judged_G if masked_G is None else judged_G & ~masked_G
    rewards_G = rewards_G - length_penalty(rewards_G, group_G, num_tokens_G, config.length_penalty)
    advantages_G = np.zeros_like(rewards_G)
    if config.kind == "custom":
        advantages_G[judged_G] = _custom(rewards_G[judged_G], group_G[judged_G], num_tokens_G[judged_G], config)
    elif config.kind == "reinforce_pp":
        advantages_G[judged_G] = rewards_G[judged_G]
    else:
        for group in np.unique(group_G[judged_G]):
            members_G = (group_G == group) & judged_G
            advantages_G[members_G] = _compared(rewards_G[members_G], config)
    if is_whitened and (config.norm == "batch" or config.kind.startswith("reinforce_pp")):
        counts_G = np.where(eligible_G, num_tokens_G, 0)
        mean, std = whitening(advantages_G, counts_G)
        whitened_G = (advantages_G - mean) / std if std > 0 else np.zeros_like(advantages_G)
        is_flat_G = _is_flat(advantages_G, group_G) if config.kind != "reinforce_pp" else np.zeros_like(judged_G)
        advantages_G = np.where(~is_flat_G, whitened_G, 0.0)
    elif config.norm == "batch_std":
        _, std = whitening(advantages_G, eligible_G)
        advantages_G = advantages_G / std if std > 0 else np.zeros_like(advantages_G)
    return np.where(eligible_G, advantages_G, 0.0)


def whitening(values_N: np.ndarray, counts_N: np.ndarray | None = None) -> tuple[float, float]:
    """Return the mean and standard deviation to whiten values by; the latter is 0 if all counted values are equal.

    Args:
        values_N: One value for each token, or for each sample.
        counts_N: How often each value counts; None: once.
    """
    counts_N = np.ones_like(values_N) if counts_N is None else np.asarray(counts_N, dtype=np.float64)
    seen_N = values_N[counts_N > 0]
    if len(seen_N) == 0 or seen_N.max() == seen_N.min():
        return 0.0, 0.0
    total = counts_N.sum()
    mean = float((counts_N * values_N).sum() / total)
    variance = float((counts_N * (values_N - mean) ** 2).sum() / (total - 1))
    return mean, float(np.sqrt(variance + VARIANCE_EPS))


def length_penalty(
    rewards_G: np.ndarray, group_G: np.ndarray, num_tokens_G: np.ndarray, config: LengthPenaltyConfig
) -> np.ndarray:
    """Return float64[G]: the length penalty of each sample, to subtract from its reward.

    soft_overlong: overlong_factor * (tokens - (max_tokens - buffer_tokens)) / buffer_tokens, at least 0 and, as in its
        definition, `overlong_factor` from max_tokens on (Yu et al. 2025, "DAPO", eq. 13).
    linear: length_factor * max(mean reward of the group, 0) * tokens / tokens of its longest sample (prime-rl's length
        penalty, own tokens only).
    """
    num_tokens_G = np.asarray(num_tokens_G, dtype=np.float64)
    if config.kind == "soft_overlong":
        over_G = (num_tokens_G - (config.max_tokens - config.buffer_tokens)) / config.buffer_tokens
        return config.overlong_factor * over_G.clip(0, 1)
    penalty_G = np.zeros_like(rewards_G)
    if config.kind == "linear":
        judged_G = ~np.isnan(rewards_G)
        for group in np.unique(group_G[judged_G]):
            members_G = (group_G == group) & judged_G
            share = num_tokens_G[members_G] / num_tokens_G[members_G].max()
            penalty_G[members_G] = config.length_factor * max(rewards_G[members_G].mean(), 0.0) * share
    return penalty_G


def _compared(rewards: np.ndarray, config: AdvantageConfig) -> np.ndarray:
    """Return the advantages of the judged samples of one group."""
    if config.kind == "maxrl" and rewards.min() < 0:
        raise DataError(
            f"algorithm.advantage.kind = 'maxrl' needs rewards of at least 0, found {rewards.min():g}; take another "
            "estimator or another reward profile"
        )
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    mean = rewards.mean()
    divisor = 1.0
    if config.kind == "grpo":
        divisor = rewards.std(ddof=1) + STD_EPS
    elif config.kind == "rloo":
        divisor = (len(rewards) - 1) / len(rewards)
    elif config.kind == "maxrl":
        divisor = mean
    return np.asarray((rewards - mean) / divisor)


def _is_flat(advantages_G: np.ndarray, group_G: np.ndarray) -> np.ndarray:
    """Return bool[G]: whether every sample of the sample's group has advantage 0."""
    return ~np.isin(group_G, group_G[advantages_G != 0])


def _custom(
    rewards_G: np.ndarray, group_G: np.ndarray, num_tokens_G: np.ndarray, config: AdvantageConfig
) -> np.ndarray:
    function = load_function(config.function, "algorithm.advantage.function")
    advantages_G = np.asarray(function(rewards_G, group_G, num_tokens_G, **config.options), dtype=np.float64)
    if advantages_G.shape != rewards_G.shape or not np.isfinite(advantages_G).all():
        raise DataError(
            f"algorithm.advantage.function = {config.function!r} returned shape {advantages_G.shape} for "
            f"{len(rewards_G)} samples, or a value that is not finite; it must return one finite number a sample"
        )
    return advantages_G
