"""Metrics of the samples of an optimizer step: rewards, lengths, staleness.

Legend: G = samples of the batch.
"""

from collections.abc import Sequence

import numpy as np

PASSED_REWARD = 0.5
"""Smallest reward of a sample that passes: most of a verifier's 0 to 1, whatever it gives for the format alone."""


def batch_stats(
    rewards: Sequence[Sequence[float]], num_tokens_G: np.ndarray, staleness: Sequence[int]
) -> dict[str, float]:
    """Return metrics of the batch by name.

    - `reward_mean`, `_std`, `_min`, `_max`: over judged samples.
    - `zero_std_fraction`: share of groups whose judged samples all have one reward.
    - `pass_rate_<bin>`: share of groups by how many of their judged samples pass: `0`, `to_25` (above 0, up to a
      quarter), `to_50`, `to_75`, `below_100`, `100`. Together 1.
    - `sample_tokens_mean`, `_min`, `_max`, `staleness_mean`, `_max`; `lagging_group_fraction`: share of groups whose
      staleness is above 0.

    Args:
        rewards: Group by group; NaN for a sample that was not judged, which counts in no reward.
        num_tokens_G: The policy's own tokens of each sample.
        staleness: Staleness of each group: published version minus the version of its oldest token.
    """
    rewards_G = np.array([reward for group in rewards for reward in group], dtype=np.float64)
    judged = rewards_G[np.isfinite(rewards_G)]
    return {
        "reward_mean": float(judged.mean()) if len(judged) else 0.0,
        "reward_std": float(judged.std()) if len(judged) else 0.0,
        "reward_min": float(judged.min()) if len(judged) else 0.0,
        "reward_max": float(judged.max()) if len(judged) else 0.0,
        **_of_groups(rewards),
        "num_groups": float(len(rewards)),
        "num_samples": float(len(rewards_G)),
        "sample_tokens_mean": float(np.mean(num_tokens_G)),
        "sample_tokens_min": float(np.min(num_tokens_G)),
        "sample_tokens_max": float(np.max(num_tokens_G)),
        "staleness_mean": float(np.mean(staleness)),
        "staleness_max": float(np.max(staleness)),
        "lagging_group_fraction": float(np.mean(np.array(staleness) > 0)),
    }


def _of_groups(rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the shares of groups without spread and by pass rate, leaving out groups without a judged sample."""
    groups = [judged for group in rewards if len(judged := np.array(group)[~np.isnan(group)])]
    rates = np.array([(judged >= PASSED_REWARD).mean() for judged in groups])
    bins = {
        "0": rates == 0,
        "to_25": (rates > 0) & (rates <= 0.25),
        "to_50": (rates > 0.25) & (rates <= 0.5),
        "to_75": (rates > 0.5) & (rates <= 0.75),
        "below_100": (rates > 0.75) & (rates < 1),
        "100": rates == 1,
    }
    num_groups = max(1, len(groups))
    return {
        "zero_std_fraction": sum(bool((judged == judged[0]).all()) for judged in groups) / num_groups,
        **{f"pass_rate_{name}": float(chosen.sum()) / num_groups for name, chosen in bins.items()},
    }
