"""Waits between failures in a row."""

from penstock.runtime.backoff import Backoff


def test_waits_double_up_to_the_bound() -> None:
    """However many failures there were."""
    backoff = Backoff(first_s=0.5, max_s=10.0)
    assert [backoff.after(count) for count in (0, 1, 2, 3, 5, 6, 10**9)] == [0.5, 0.5, 1.0, 2.0, 8.0, 10.0, 10.0]
