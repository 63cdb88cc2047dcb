"""When a turn goes on elsewhere, and when it is given up."""

import pytest

from penstock.clients.stream_attempt import LostReplicaError, UnreachableError
from penstock.clients.turn import RetryBudget
from penstock.errors import (
    DeadlineError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    PoisonError,
    UnavailableError,
)


def test_rejections_and_lost_connections_cost_nothing() -> None:
    """However many: no replica had the turn."""
    budget = RetryBudget(1)
    for _ in range(100):
        for error in (OverloadedError("full"), NotReadyError("old"), UnreachableError("gone")):
            budget.count(error, has_progressed=False)


def test_enough_failures_in_a_row_end_the_turn_for_good() -> None:
    """With the error that nobody retries. Tokens between them start the count again, but not for ever."""
    budget = RetryBudget(3)
    for has_progressed in (False, False, True, False, False):
        budget.count(UnavailableError("crashed"), has_progressed=has_progressed)
    with pytest.raises(PoisonError, match="given up after 6 replicas failed; the last: crashed"):
        budget.count(UnavailableError("crashed"), has_progressed=False)
    budget = RetryBudget(3)
    for _ in range(11):
        budget.count(UnavailableError("crashed"), has_progressed=True)
    with pytest.raises(PoisonError, match="given up after 12 replicas failed"):
        budget.count(UnavailableError("crashed"), has_progressed=True)


def test_a_replica_that_stops_answering_with_the_turn_counts_as_broken_by_it() -> None:
    """It is found dead, not seen to crash; but it had received the turn."""
    budget = RetryBudget(3)
    for _ in range(2):
        budget.count(LostReplicaError("does not answer"), has_progressed=False)
        assert budget.is_suspect
    with pytest.raises(PoisonError, match="given up after 3 replicas failed; the last: does not answer"):
        budget.count(LostReplicaError("does not answer"), has_progressed=False)


@pytest.mark.parametrize("error", [InvalidRequestError("no"), DeadlineError("late")])
def test_what_would_be_the_same_elsewhere_ends_the_turn(error: PenstockError) -> None:
    """With that error."""
    with pytest.raises(type(error)) as caught:
        RetryBudget(3).count(error, has_progressed=True)
    assert caught.value is error


def test_a_crash_in_a_replica_is_tried_elsewhere_but_breaks_nothing() -> None:
    """One faulty replica must not cost a group its turn. After enough of them the error is the turn's, and what it was
    for may be delivered again."""
    budget, error = RetryBudget(3), PenstockError("odd")
    for _ in range(2):
        budget.count(error, has_progressed=False)
        assert not budget.is_suspect
    with pytest.raises(PenstockError) as caught:
        budget.count(error, has_progressed=False)
    assert caught.value is error
