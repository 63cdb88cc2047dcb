"""Group advantages: numbers by hand, and exact zeros where there is nothing to learn."""

import numpy as np
import pytest

from services.trainer.algorithm.advantage import sample_advantages
from services.trainer.algorithm.config import AdvantageConfig


def group_advantages(rewards: np.ndarray, groups: np.ndarray, kind: str = "grpo") -> np.ndarray:
    """Of samples of one token."""
    config = AdvantageConfig.model_validate({"kind": kind})
    return sample_advantages(rewards, groups, np.ones(len(rewards)), config)


def test_grpo_divides_by_the_standard_deviation() -> None:
    """1, 0, 0, 0: mean 1/4, variance (9 + 3) / 16 / 3 = 1/4, so the advantages are 3/2 and -1/2."""
    advantages = group_advantages(np.array([1.0, 0, 0, 0]), np.zeros(4, int))
    np.testing.assert_allclose(advantages, [1.5, -0.5, -0.5, -0.5], rtol=3e-6)


def test_dr_grpo_only_subtracts_the_mean() -> None:
    """1, 0, 0, 0 -> 3/4 and -1/4, exactly."""
    advantages = group_advantages(np.array([1.0, 0, 0, 0]), np.zeros(4, int), kind="dr_grpo")
    assert advantages.tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("reward", [0.9, 0.1, 1 / 3, -7e-20])
def test_equal_rewards_have_advantage_exactly_zero(kind: str, reward: float) -> None:
    """In float32, eight rewards of 0.9 had advantage -0.06 each."""
    rewards = np.full(8, reward, dtype=np.float32)
    assert group_advantages(rewards, np.zeros(8, int), kind=kind).tolist() == [0.0] * 8


def test_groups_are_explicit_and_may_be_mixed_up() -> None:
    """Each sample is compared with its own group only, wherever its members are."""
    advantages = group_advantages(np.array([1.0, 5, 0, 5, 1, 0]), np.array([4, 9, 4, 9, 4, 4]), kind="dr_grpo")
    assert advantages.tolist() == [0.5, 0, -0.5, 0, 0.5, -0.5]


def test_shifting_and_scaling_rewards_changes_nothing_in_grpo() -> None:
    """Invariance under r -> 10 r + 3, up to the epsilon."""
    rewards = np.random.default_rng(0).random(8)
    groups = np.zeros(8, int)
    np.testing.assert_allclose(group_advantages(rewards, groups), group_advantages(10 * rewards + 3, groups), rtol=1e-4)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
def test_samples_that_were_not_judged_neither_teach_nor_count(kind: str) -> None:
    """The others' advantages are those of a group without it; its own is 0, not that of a wrong answer."""
    nan = float("nan")
    with_it = group_advantages(np.array([1.0, nan, 0, 0]), np.zeros(4, int), kind=kind)
    without = group_advantages(np.array([1.0, 0, 0]), np.zeros(3, int), kind=kind)
    assert with_it.tolist() == [without[0], 0.0, without[1], without[2]]
    assert group_advantages(np.array([nan, nan]), np.zeros(2, int), kind=kind).tolist() == [0.0, 0.0]
    assert group_advantages(np.array([1.0, nan]), np.zeros(2, int), kind=kind).tolist() == [0.0, 0.0]


def test_refuses_infinite_rewards() -> None:
    """One would reach every weight of the model."""
    with pytest.raises(ValueError, match="infinite"):
        group_advantages(np.array([1.0, float("inf")]), np.zeros(2, int))
