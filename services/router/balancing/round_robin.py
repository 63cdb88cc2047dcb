"""Round robin: replicas in turn, by id."""

from services.router.balancing.pool_view import PoolView, Query
from services.router.balancing.replica_status import ReplicaStatus


class RoundRobinBalancer:
    """Chooses the next fit replica after the last choice; sessions and loads do not matter."""

    reads_blocks = False

    def __init__(self) -> None:
        """Start with the first."""
        self._last = ""

    def choose(self, query: Query, pool: PoolView, now: float) -> ReplicaStatus | None:
        """Return the replica that gets the call; None exactly if none is fit."""
        last = self._last
        fit = pool.find_fit(query, now)
        return min(fit, key=lambda each: (each.replica_id <= last, each.replica_id), default=None)

    def find_home(self, query: Query, pool: PoolView, now: float) -> tuple[str, bool]:
        """Return no home: no call waits while a replica can take it."""
        return "", False

    def record(self, query: Query, replica_id: str) -> None:
        """Continue after this replica."""
        self._last = replica_id
