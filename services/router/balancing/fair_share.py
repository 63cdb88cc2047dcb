"""Corrects the rounding of least-loaded balancing over time.

A replica whose fair share is 3.4 calls runs 3 (12% less) or 4 (18% more), and nearly always the same number: least
loaded alone left replicas of eight slots 22 to 28% off over minutes (docs/benchmarks.md, "Replicas that come and go").
So the difference is integrated over time, as in an integral controller, and counted as load; it decays. Invariant: the
correction stays within a quarter of a replica's slots, so that the past never outweighs the present load.
"""

import math

from services.router.balancing.pool_view import PoolView
from services.router.balancing.replica_status import ReplicaStatus

_STEP_S = 0.1
"""Minimum seconds between integration steps: a step looks at every replica, which is too much for every call."""
_TIME_CONSTANT_S = 5.0
"""One call above the fair share for this long counts as one call of load."""
_DECAY_S = 60.0
"""Seconds in which the correction falls to 1/e."""
_MAX_SHARE = 0.25
"""Maximum correction in either direction, as a share of a replica's slots."""


class FairShare:
    """The recent excess of each replica that reads prompts and takes calls, except held-out ones."""

    def __init__(self) -> None:
        """Start without a history."""
        self._excess_calls: dict[str, float] = {}
        self._updated_at = -math.inf

    def update(self, pool: PoolView, now: float) -> None:
        """Integrate the present loads over the time since the last step, if a step is due; newcomers start at 0."""
        if now - self._updated_at < _STEP_S:
            return
        elapsed_s, self._updated_at = min(now - self._updated_at, _TIME_CONSTANT_S), now
        counted = [
            each for each in pool.replicas.values() if each.is_open and each.reads_prompts and not each.is_held_out
        ]
        loads = pool.loads(counted)
        num_slots = sum(each.max_running for each in counted)
        num_calls = sum(loads[each.replica_id] * each.max_running for each in counted)
        mean_load = num_calls / num_slots if num_slots else 0.0
        kept = math.exp(-elapsed_s / _DECAY_S)
        excess_calls = {}
        for each in counted:
            most = _MAX_SHARE * each.max_running
            added = (loads[each.replica_id] - mean_load) * each.max_running * elapsed_s / _TIME_CONSTANT_S
            before = self._excess_calls.get(each.replica_id)
            excess_calls[each.replica_id] = 0.0 if before is None else min(max(kept * before + added, -most), most)
        self._excess_calls = excess_calls

    def excess_load(self, replica: ReplicaStatus) -> float:
        """Return the calls per slot to add to the replica's load; negative if it had less than its share."""
        return self._excess_calls.get(replica.replica_id, 0.0) / replica.max_running
