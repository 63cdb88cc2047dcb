"""What replicas have had beyond their even part lately: least loaded is not even where calls are few.

A replica whose even part is 3.4 calls has 3, which is 13% less, or 4, which is 17% more; and as it happens, it has the
same one of the two nearly always. So the difference is summed up over time and counts as load, as in an integral
controller, and is forgotten in time. Invariant: what is counted stays within a quarter of a replica's places, so that
the past never outweighs what a replica has to do now.
"""

import math
from collections.abc import Iterable

from services.router.balancing.replica_status import ReplicaStatus

_TIME_CONSTANT_S = 5.0
"""A replica that has one call too many for so long counts as if it had one more."""
_FORGOTTEN_IN_S = 60.0
_MAX_SHARE = 0.25
"""Of a replica's places: the most that is counted, up or down."""


class FairShare:
    """Of the replicas that read prompts and take calls now, whatever a single call wants of them."""

    def __init__(self) -> None:
        """Nobody has had anything."""
        self._calls: dict[str, float] = {}
        self._looked_at = 0.0

    def look(self, candidates: Iterable[ReplicaStatus], now: float) -> None:
        """Count what they have now for the time since the last look; who was not there then begins at none."""
        elapsed_s, self._looked_at = min(now - self._looked_at, _TIME_CONSTANT_S), now
        there = [each for each in candidates if each.is_open and each.reads_prompts]
        num_places = sum(each.num_places for each in there)
        even = sum(each.load * each.num_places for each in there) / num_places if num_places else 0.0
        kept = math.exp(-elapsed_s / _FORGOTTEN_IN_S)
        calls = {}
        for each in there:
            most = _MAX_SHARE * each.num_places
            more = (each.load - even) * each.num_places * elapsed_s / _TIME_CONSTANT_S
            before = self._calls.get(each.replica_id)
            calls[each.replica_id] = 0.0 if before is None else min(max(kept * before + more, -most), most)
        self._calls = calls

    def load(self, candidate: ReplicaStatus) -> float:
        """Calls per place, to be added to what it has; below 0 if it has had too little."""
        return self._calls.get(candidate.replica_id, 0.0) / candidate.num_places
