"""The wait after the n-th failure in a row: twice the one before, up to a bound."""

from dataclasses import dataclass

_MAX_DOUBLINGS = 64


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double from `first_s` up to `max_s` seconds."""

    first_s: float
    max_s: float

    def after(self, num_failures: int) -> float:
        """Return the seconds to wait after n failures in a row, n at least 1."""
        return min(self.max_s, self.first_s * 2.0 ** min(max(num_failures, 1) - 1, _MAX_DOUBLINGS))
