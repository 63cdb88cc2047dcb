"""Limits how many calls a replica gets at once. Pure: it sees only the replica's reports.

Additive increase, multiplicative decrease: several routers that each do this share a replica fairly without
communication. Invariant: 1 <= max_in_flight <= max(1, max_running * factor).
"""

from services.router.tuning import LimitTuning


class Limit:
    """The limit of one replica."""

    __slots__ = ("_max_running", "_tuning", "_value", "_was_rejected", "_was_used", "max_in_flight")

    def __init__(self, tuning: LimitTuning, max_running: int) -> None:
        """Start with the number of calls that the replica runs at once."""
        self._tuning = tuning
        self._max_running = max(1, max_running)
        self._value = float(self._max_running)
        self._was_used = False
        self._was_rejected = False
        self.max_in_flight = self._max_running

    def use(self, num_in_flight: int) -> None:
        """Note the calls in flight; a limit that is never reached does not grow."""
        if num_in_flight >= self.max_in_flight:
            self._was_used = True

    def reject(self) -> None:
        """Shrink the limit because the replica rejected a call as one too many, whatever its lease says; the next
        report does not raise the limit."""
        self._was_rejected = True
        self._set(self._value * self._tuning.decrease)

    def report(self, *, max_running: int, num_queued: int, kv_use: float) -> None:
        """Adapt to the replica's lease; call it once per lease interval."""
        tuning, may_grow = self._tuning, self._was_used and not self._was_rejected
        self._was_used = self._was_rejected = False
        if max_running >= 1 and max_running != self._max_running:
            self._value *= max_running / self._max_running
            self._max_running = max_running
        if kv_use > tuning.kv_high or num_queued > tuning.queue_high * self._max_running:
            self._set(self._value * tuning.decrease)
        elif may_grow:
            self._set(self._value + max(1.0, tuning.increase * self._max_running))
        else:
            self._set(self._value)

    def _set(self, value: float) -> None:
        self._value = max(1.0, min(value, self._tuning.factor * self._max_running))
        self.max_in_flight = int(self._value)
