"""The circuit breaker of one replica. Pure: time is passed in, in seconds of any clock that only goes forward.

    CLOSED --failures in a row--> OPEN --open time passed, next call--> HALF_OPEN --success--> CLOSED
                                   ^                                        |
                                   +---------- failure: twice as long ------+

Invariant: a replica whose breaker is not CLOSED is given one call at a time, the probe; one that has told nothing for
as long as the breaker was open is no longer waited for.
"""

import enum
import math

from services.router.config import BreakerConfig


class BreakerState(enum.Enum):
    """Where a breaker stands."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Whether one replica is given calls. `begin` each call and end it with `succeed`, `fail` or `abandon`."""

    __slots__ = ("_config", "_num_failures", "_open_s", "_open_until", "state")

    def __init__(self, config: BreakerConfig) -> None:
        """Start closed."""
        self._config = config
        self._num_failures = 0
        self._open_s = config.open_s
        self._open_until = 0.0
        self.state = BreakerState.CLOSED

    def allows(self, now: float) -> bool:
        """Whether a call may begin."""
        return self.state is BreakerState.CLOSED or now >= self._open_until

    def begin(self, now: float) -> bool:
        """A call that is allowed begins; true if it is a probe."""
        if self.state is BreakerState.CLOSED:
            return False
        self.state = BreakerState.HALF_OPEN
        self._open_until = now + self._open_s
        return True

    def succeed(self, *, probe: bool) -> None:
        """The call got an answer, or the first part of one."""
        if probe or self.state is BreakerState.CLOSED:  # older calls say nothing about how the replica is now
            self.state = BreakerState.CLOSED
            self._num_failures = 0
            self._open_s = self._config.open_s

    def fail(self, now: float, *, probe: bool, unreachable: bool = False) -> None:
        """The replica broke the call off, or could not be reached at all."""
        if self.state is BreakerState.CLOSED:
            self._num_failures += 1
            if not unreachable and self._num_failures < self._config.failures:
                return
        elif probe:
            self._open_s = min(2 * self._open_s, self._config.max_open_s)
        else:
            return
        self.state = BreakerState.OPEN
        self._open_until = now + self._open_s

    def abandon(self, *, probe: bool) -> None:
        """The call ended without telling anything of the replica, as when its caller went away: the next one probes."""
        if probe and self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN
            self._open_until = -math.inf
