"""One after the other, by id."""

from collections.abc import Mapping

from services.router.balancing.balancer import find_fit
from services.router.balancing.replica_status import Query, ReplicaStatus


class RoundRobinBalancer:
    """The first that is fit after the one chosen last; sessions and loads do not matter."""

    reads_blocks = False

    def __init__(self) -> None:
        """Start with the first."""
        self._last = ""

    def choose(self, query: Query, candidates: Mapping[str, ReplicaStatus], now: float) -> ReplicaStatus | None:
        """The replica that gets the call; None exactly if none is fit."""
        last = self._last
        fit = find_fit(query, candidates, now)
        return min(fit, key=lambda each: (each.replica_id <= last, each.replica_id), default=None)

    def record(self, query: Query, replica_id: str) -> None:
        """The next one's turn comes."""
        self._last = replica_id
