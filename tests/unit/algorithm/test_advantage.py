"""Advantages: numbers by hand, and exact zeros where there is nothing to learn. test_papers has every formula."""

import math
import typing

import numpy as np
import pytest

from services.trainer.algorithm.advantage import sample_advantages
from services.trainer.algorithm.axes import AdvantageConfig
from services.trainer.algorithm.config import AlgorithmConfig

KINDS = [kind for kind in typing.get_args(AdvantageConfig.model_fields["kind"].annotation) if kind != "custom"]
COMPARING = [kind for kind in KINDS if kind != "reinforce_pp"]
NAN = float("nan")


def advantages(
    rewards: list[float], groups: list[int] | None = None, *, kind: str = "grpo", norm: str = "none"
) -> list[float]:
    """Of samples of 1, 2, 3, ... tokens; one group unless others are given."""
    config = AdvantageConfig.model_validate({"kind": kind, "norm": norm})
    members, lengths = np.array(groups or [0] * len(rewards)), np.arange(1, len(rewards) + 1)
    return sample_advantages(np.array(rewards), members, lengths, config).tolist()


def norms(kind: str) -> list[str]:
    """The normalisations that an estimator takes."""
    return ["none"] if kind.startswith("reinforce_pp") else ["none", "batch", "batch_std"]


EVERY = [(kind, norm) for kind in KINDS for norm in norms(kind)]
EVERY_COMPARING = [(kind, norm) for kind, norm in EVERY if kind in COMPARING]


def test_grpo_divides_by_the_standard_deviation() -> None:
    """1, 0, 0, 0: mean 1/4, variance (9 + 3) / 16 / 3 = 1/4, so the advantages are 3/2 and -1/2."""
    np.testing.assert_allclose(advantages([1, 0, 0, 0]), [1.5, -0.5, -0.5, -0.5], rtol=3e-6)


def test_the_others_by_hand() -> None:
    """1, 0, 0, 0."""
    assert advantages([1, 0, 0, 0], kind="dr_grpo") == [0.75, -0.25, -0.25, -0.25]
    assert advantages([1, 0, 0, 0], kind="rloo") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert advantages([1, 0, 0, 0], kind="maxrl") == [3, -1, -1, -1]


def test_whitening_counts_tokens() -> None:
    """Rewards 1 and 0 of 1 and 2 tokens: mean 1/3, variance (4/9 + 2/9) / 2 = 1/3."""
    expected = [2 / 3 / math.sqrt(1 / 3), -1 / 3 / math.sqrt(1 / 3)]
    assert advantages([1, 0], [0, 1], kind="reinforce_pp") == pytest.approx(expected)


def test_dividing_by_the_deviation_of_the_batch_keeps_every_sign() -> None:
    """Groups 1, 0 and 5, 5 of 1 to 4 tokens: 1/2 and -1/2 over the deviation of 1/2, -1/2, 0, 0, sqrt(1/6).

    The good sample is the shortest, so whitening by tokens shifts the whole batch up.
    """
    expected = [0.5 * math.sqrt(6), -0.5 * math.sqrt(6), 0, 0]
    found = advantages([1, 0, 5, 5], [0, 0, 1, 1], kind="dr_grpo", norm="batch_std")
    assert found == pytest.approx(expected, rel=1e-6)
    assert AlgorithmConfig(preset="cispo").advantage.norm == "batch_std"
    rewards, groups = [1.0, *[0.0] * 2, *[1.0] * 2, 0.0], [0, 0, 0, 1, 1, 1]
    signs = {
        norm: np.sign(advantages(rewards, groups, kind="dr_grpo", norm=norm)).tolist() for norm in ("none", "batch_std")
    }
    assert signs["batch_std"] == signs["none"]


@pytest.mark.parametrize(("kind", "norm"), EVERY)
@pytest.mark.parametrize("reward", [0.9, 0.1, 1 / 3, 7e-20, 0.0])
def test_equal_rewards_have_advantage_exactly_zero(kind: str, norm: str, reward: float) -> None:
    """In float32, eight rewards of 0.9 had advantage -0.06 each. reinforce_pp: in the whole batch."""
    assert advantages([float(np.float32(reward))] * 8, kind=kind, norm=norm) == [0.0] * 8


@pytest.mark.parametrize(("kind", "norm"), EVERY_COMPARING)
def test_a_group_without_spread_stays_at_zero_beside_others(kind: str, norm: str) -> None:
    """Equal rewards, a group of one, and one with a single judged sample; the others have advantages."""
    rewards, groups = [0.9, 0.9, 1, 0, 0, 0.7, 1, NAN], [1, 1, 2, 2, 2, 3, 4, 4]
    found = advantages(rewards, groups, kind=kind, norm=norm)
    assert [found[i] for i in (0, 1, 5, 6, 7)] == [0.0] * 5
    assert all(found[i] for i in (2, 3, 4))


def test_reinforce_pp_compares_with_the_batch() -> None:
    """It has no groups: equal rewards of a group are better or worse than the rest; one sample alone is neither."""
    found = advantages([1, 1, 0, 0], [1, 1, 2, 2], kind="reinforce_pp")
    assert found[0] == found[1] > 0 > found[2] == found[3]
    assert advantages([0.7], kind="reinforce_pp") == [0.0]


def test_groups_are_explicit_and_may_be_mixed_up() -> None:
    """Each sample is compared with its own group only, wherever its members are."""
    assert advantages([1, 5, 0, 5, 1, 0], [4, 9, 4, 9, 4, 4], kind="dr_grpo") == [0.5, 0, -0.5, 0, 0.5, -0.5]


def test_shifting_and_scaling_rewards_changes_nothing_in_grpo() -> None:
    """Invariance under r -> 10 r + 3, up to the epsilon."""
    rewards = np.random.default_rng(0).random(8)
    np.testing.assert_allclose(advantages(rewards.tolist()), advantages((10 * rewards + 3).tolist()), rtol=1e-4)


@pytest.mark.parametrize(("kind", "norm"), EVERY)
def test_samples_that_were_not_judged_neither_teach_nor_count(kind: str, norm: str) -> None:
    """The others' advantages are those of a batch without it; its own is 0, not that of a wrong answer."""
    without = advantages([1, 0, 0], kind=kind, norm=norm)
    assert advantages([1, 0, 0, NAN], kind=kind, norm=norm) == [*without, 0.0]
    assert advantages([NAN, NAN], kind=kind, norm=norm) == [0.0, 0.0]
    assert advantages([1, NAN], kind=kind, norm=norm) == [0.0, 0.0]


@pytest.mark.parametrize(("kind", "norm"), EVERY)
def test_a_masked_sample_is_in_its_groups_mean_and_in_no_statistic_of_the_batch(kind: str, norm: str) -> None:
    """Its length, and the reward of one that is compared with nobody, change no other advantage."""
    config = AdvantageConfig.model_validate({"kind": kind, "norm": norm})
    groups, masked = np.array([1, 1, 1, 2, 2, 2, 3]), np.array([0, 0, 1, 0, 0, 0, 1], dtype=bool)

    def found(reward: float, alone: float, num_tokens: int) -> list[float]:
        rewards = np.array([1, 0, reward, 0, 0, 1, alone])
        lengths = np.array([3, 2, num_tokens, 4, 1, 2, num_tokens])
        return sample_advantages(rewards, groups, lengths, config, masked_G=masked).tolist()

    usual = found(0.0, 0.5, 1)
    assert usual[2] == usual[6] == 0
    assert found(0.0, 50.0, 100) == usual
    if kind == "reinforce_pp":
        assert found(1.0, 0.5, 1) == usual
    else:
        assert found(1.0, 0.5, 1)[0] < usual[0], "a prompt that others answer well is an easier one"


def test_refuses_infinite_rewards() -> None:
    """One would reach every weight of the model."""
    with pytest.raises(ValueError, match=r"rewards must be finite, .* not inf"):
        advantages([1, math.inf])
