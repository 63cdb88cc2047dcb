"""Failures and losses in a row: what ends a run, and what is borne."""

import pytest

from penstock.errors import DataError
from services.trainer.flow.failure_streak import FailureStreak


def test_a_sound_group_ends_a_streak() -> None:
    """Failures and losses are then counted anew."""
    streak = FailureStreak(max_in_a_row=2)
    for _ in range(3):
        for index in range(2):
            streak.fail(index, "broken")
            streak.lose([7], "gone")
        streak.end()
    streak.fail(0, "broken")
    streak.fail(1, "broken")
    with pytest.raises(DataError, match=r"3 groups in a row failed, .*more than 2.*number 5: unknown"):
        streak.fail(5, "unknown profile")


def test_losses_are_counted_by_group() -> None:
    """A server that lost its store lost all groups once; a group that is lost each time is never going to arrive."""
    streak = FailureStreak(max_in_a_row=2)
    streak.lose(range(100), "the bus lost it")
    streak.lose(range(100), "the bus lost it")
    with pytest.raises(DataError, match=r"group 3 was lost 3 times .*the bus lost it; see that the NATS server keeps"):
        streak.lose([3], "the bus lost it")
