"""How many calls a replica is given at once. Pure: it is told what the replica reports, and nothing else.

Additive increase, multiplicative decrease: several routers that each do this for themselves come to share a replica
without telling each other. Invariant: 1 <= max_in_flight <= max(1, max_running * factor).
"""

from services.router.config import LimitConfig


class Limit:
    """One replica's limit; `max_in_flight` is read for every call, so it is a plain number."""

    __slots__ = ("_config", "_max_running", "_value", "_was_refused", "_was_used", "max_in_flight")

    def __init__(self, config: LimitConfig, max_running: int) -> None:
        """Start with as many max_in_flight as the replica runs at once."""
        self._config = config
        self._max_running = max(1, max_running)
        self._value = float(self._max_running)
        self._was_used = False
        self._was_refused = False
        self.max_in_flight = self._max_running

    def use(self, num_in_flight: int) -> None:
        """So many calls are with the replica now; a limit that is never reached is no reason to raise it."""
        if num_in_flight >= self.max_in_flight:
            self._was_used = True

    def refuse(self) -> None:
        """The replica turned a call away as one too many, whatever its lease says; the next report raises nothing."""
        self._was_refused = True
        self._set(self._value * self._config.decrease)

    def report(self, *, max_running: int, num_queued: int, kv_use: float) -> None:
        """How the replica does by its lease; to be told as often as leases are renewed."""
        config, may_grow = self._config, self._was_used and not self._was_refused
        self._was_used = self._was_refused = False
        if max_running >= 1 and max_running != self._max_running:
            self._value *= max_running / self._max_running
            self._max_running = max_running
        if kv_use > config.kv_high or num_queued > config.queue_high * self._max_running:
            self._set(self._value * config.decrease)
        elif may_grow:
            self._set(self._value + max(1.0, config.increase * self._max_running))
        else:
            self._set(self._value)

    def _set(self, value: float) -> None:
        self._value = max(1.0, min(value, self._config.factor * self._max_running))
        self.max_in_flight = int(self._value)
