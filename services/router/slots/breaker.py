"""The circuit breaker of one replica. Pure: time is passed in, in seconds of any monotonic clock.

    CLOSED --failures in a row--> OPEN --pause over, next call--> HALF_OPEN --success--> CLOSED
                                   ^                                  |
                                   +------ failure: pause doubles ----+

Invariant: a replica whose breaker is not CLOSED gets one call at a time, the probe. A probe without a report for the
length of the pause is abandoned.
"""

import enum
import math

from services.router.tuning import BreakerTuning


class BreakerState(enum.Enum):
    """The state of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Decides whether one replica gets calls. `begin` each call and end it with `succeed`, `fail` or `abandon`."""

    __slots__ = ("_num_failures", "_open_s", "_open_until", "_tuning", "state")

    def __init__(self, tuning: BreakerTuning) -> None:
        """Start closed."""
        self._tuning = tuning
        self._num_failures = 0
        self._open_s = tuning.open_s
        self._open_until = 0.0
        self.state = BreakerState.CLOSED

    @property
    def blocked_until(self) -> float:
        """The time from which a call may begin; -inf while closed."""
        return -math.inf if self.state is BreakerState.CLOSED else self._open_until

    def allows(self, now: float) -> bool:
        """Return whether a call may begin."""
        return now >= self.blocked_until

    def begin(self, now: float) -> bool:
        """Begin an allowed call; return whether it is a probe."""
        if self.state is BreakerState.CLOSED:
            return False
        self.state = BreakerState.HALF_OPEN
        self._open_until = now + self._open_s
        return True

    def succeed(self, *, probe: bool) -> None:
        """Note that the call got an answer, or the first part of one."""
        if probe or self.state is BreakerState.CLOSED:  # calls from before the failure say nothing about the present
            self.state = BreakerState.CLOSED
            self._num_failures = 0
            self._open_s = self._tuning.open_s

    def fail(self, now: float, *, probe: bool, unreachable: bool = False) -> None:
        """Note that the replica broke the call off, or could not be reached."""
        if self.state is BreakerState.CLOSED:
            self._num_failures += 1
            if not unreachable and self._num_failures < self._tuning.failures:
                return
        elif probe:
            self._open_s = min(2 * self._open_s, self._tuning.max_open_s)
        else:
            return
        self.state = BreakerState.OPEN
        self._open_until = now + self._open_s

    def abandon(self, *, probe: bool) -> None:
        """Note that the call ended without a verdict on the replica, as when its caller left: the next call probes."""
        if probe and self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN
            self._open_until = -math.inf
