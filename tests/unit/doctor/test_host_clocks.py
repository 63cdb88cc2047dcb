"""The clock of another host, from the times of a question and its answer."""

import pytest

from services.doctor.hosts.clocks import ahead_s


@pytest.mark.parametrize(
    ("heard_at", "said_at", "expected"),
    [
        (100.0, 100.0, 0.0),  # the answer took three seconds
        (103.0, 103.0, 0.0),  # the question did
        (100.0, 103.0, 0.0),  # the other host thought so long
        (102.5, 103.5, 0.5),
        (98.0, 103.0, -2.0),
        (190.0, 191.0, 88.0),
    ],
)
def test_what_is_on_its_way_says_nothing_of_a_clock(heard_at: float, said_at: float, expected: float) -> None:
    """Asked at 100 and answered at 103: whatever could be so with one clock is taken for one."""
    assert ahead_s(asked_at=100.0, heard_at=heard_at, said_at=said_at, answered_at=103.0) == expected
