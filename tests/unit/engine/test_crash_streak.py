"""When an engine whose calls crash is given up."""

import contextlib

import pytest

from penstock.errors import InvalidRequestError, PenstockError, UnavailableError
from services.rollout.engine.crash_streak import CrashStreak


class _Calls:
    """Calls of an engine, at times that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.streak = CrashStreak(max_in_a_row=3, min_s=20.0, clock=lambda: self.now)

    def fail(self, error: Exception, *, at: float) -> None:
        self.now = at
        with contextlib.suppress(type(error)), self.streak.counting():
            raise error


def test_crashes_over_some_time_without_an_answer_end_the_engine() -> None:
    """Three of them in a moment may have one cause that passes; the error that ends the engine names the last."""
    calls = _Calls()
    for at in (5.0, 5.1, 5.2):
        calls.fail(KeyError("meta_info"), at=at)
        calls.streak.require_useful()
    calls.fail(RuntimeError("SGLang's response is inconsistent"), at=25.0)
    with pytest.raises(
        UnavailableError, match=r"crashed in 4 calls over 20 s .* the last: RuntimeError: SGLang's response"
    ):
        calls.streak.require_useful()
    assert calls.streak.is_useless.is_set()


def test_an_answer_begins_the_count_again() -> None:
    """Also for the time that it takes."""
    calls = _Calls()
    for at in (0.0, 10.0):
        calls.fail(KeyError("x"), at=at)
    calls.streak.note_answer()
    for at in (21.0, 22.0, 40.0):
        calls.fail(KeyError("x"), at=at)
    assert not calls.streak.is_useless.is_set()


@pytest.mark.parametrize(
    "error", [InvalidRequestError("no"), UnavailableError("died"), TimeoutError(), PenstockError("odd")]
)
def test_errors_raised_on_purpose_say_nothing_about_the_engine(error: Exception) -> None:
    """Nor do deadlines: callers may be impatient."""
    calls = _Calls()
    for at in (0.0, 10.0, 20.0, 30.0):
        calls.fail(error, at=at)
    assert not calls.streak.is_useless.is_set()
