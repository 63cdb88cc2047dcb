"""The span of one attempt, in one slot."""

import time
from typing import Any

from penstock.telemetry import spans


class AttemptSpan:
    """Measures an attempt, from its slot to its end."""

    __slots__ = ("_about", "_began", "_first_token_s", "_outcome")

    def __init__(self, about: dict[str, Any]) -> None:
        """Begin; `about` says which attempt it is."""
        self._about = about
        self._began = time.monotonic()
        self._first_token_s: float | None = None
        self._outcome = "cancelled"

    def begin_answer(self) -> None:
        """Note the first chunk."""
        self._first_token_s = time.monotonic() - self._began

    def settle(self, error: Exception | None) -> None:
        """Note the outcome; without it, the caller has left."""
        self._outcome = "complete" if error is None else type(error).__name__.removesuffix("Error")

    def end(self) -> None:
        """Record the span."""
        if self._first_token_s is not None:
            self._about["first_token_s"] = self._first_token_s
        spans.record("route.attempt", self._began, **self._about, outcome=self._outcome)
