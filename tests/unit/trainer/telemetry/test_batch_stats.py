"""Metrics of a batch's samples, by hand."""

import math

import numpy as np
import pytest

from services.trainer.algorithm.metrics.samples import batch_stats


def test_groups_are_counted_by_what_share_of_them_passes() -> None:
    """One group in each bin; what was not judged counts nowhere, also where it leaves a group without spread."""
    nan = math.nan
    groups = [
        [0.0, 0.0, 0.1, 0.4],
        [1.0, 0.0, 0.0, 0.0],
        [1.0, 0.0, 0.5, 0.0],
        [1.0, 1.0, 1.0, 0.0],
        [1.0, 1.0, 1.0, 1.0, 0.0],
        [0.9, 0.9, 0.9, nan],
        [nan, nan],
    ]
    stats = batch_stats(groups, np.array([3, 5, 7]), [0, 2])
    bins = ("0", "to_25", "to_50", "to_75", "below_100", "100")
    assert [stats[f"pass_rate_{name}"] for name in bins] == [pytest.approx(1 / 6)] * 6
    assert stats["zero_std_fraction"] == pytest.approx(1 / 6)
    assert (stats["reward_min"], stats["reward_max"]) == (0.0, 1.0)
    assert (stats["sample_tokens_min"], stats["sample_tokens_mean"], stats["sample_tokens_max"]) == (3, 5, 7)
    assert (stats["staleness_mean"], stats["staleness_max"], stats["lagging_group_fraction"]) == (1, 2, 1 / 2)


def test_a_batch_that_nobody_judged_has_zeros() -> None:
    """Instead of a division by zero."""
    stats = batch_stats([[math.nan, math.nan]], np.array([1, 1]), [0])
    assert stats["reward_mean"] == stats["zero_std_fraction"] == stats["pass_rate_0"] == 0
