"""When a turn goes on elsewhere, and when it is given up."""

import pytest

from penstock.clients.stream_attempt import RetryBudget, UnreachableError
from penstock.errors import (
    DeadlineError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    UnavailableError,
)


def test_refusals_and_lost_connections_are_no_tries() -> None:
    """However many: no replica had the turn."""
    tries = RetryBudget(1)
    for _ in range(100):
        for error in (OverloadedError("full"), NotReadyError("old"), UnreachableError("gone")):
            tries.count(error, has_progressed=False)


def test_so_many_failures_in_a_row_end_the_turn() -> None:
    """Tokens between them start the count again, but not for ever."""
    tries = RetryBudget(3)
    for has_progressed in (False, False, True, False, False):
        tries.count(UnavailableError("crashed"), has_progressed=has_progressed)
    with pytest.raises(UnavailableError, match="given up after 6 replicas failed; the last: crashed"):
        tries.count(UnavailableError("crashed"), has_progressed=False)
    tries = RetryBudget(3)
    for _ in range(11):
        tries.count(UnavailableError("crashed"), has_progressed=True)
    with pytest.raises(UnavailableError, match="given up after 12 replicas failed"):
        tries.count(UnavailableError("crashed"), has_progressed=True)


@pytest.mark.parametrize("error", [InvalidRequestError("no"), DeadlineError("late"), PenstockError("odd")])
def test_what_would_be_the_same_elsewhere_ends_the_turn(error: PenstockError) -> None:
    """With that error."""
    with pytest.raises(type(error)) as caught:
        RetryBudget(3).count(error, has_progressed=True)
    assert caught.value is error
