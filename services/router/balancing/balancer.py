"""The interface of balancers."""

from typing import Protocol

from services.router.balancing.pool_view import PoolView, Query
from services.router.balancing.replica_status import ReplicaStatus


class Balancer(Protocol):
    """Chooses among the replicas that can take a call, by the view and what it remembers of its own choices."""

    reads_blocks: bool
    """Whether it wants `Query.blocks`."""

    def choose(self, query: Query, pool: PoolView, now: float) -> ReplicaStatus | None:
        """Return the replica that gets the call; None exactly if none is fit, or if it waits for `query.home`."""
        ...

    def find_home(self, query: Query, pool: PoolView, now: float) -> tuple[str, bool]:
        """Return the replica that should get the call, now or later, whether or not others could take it, and whether
        it is full; an empty id if there is none."""
        ...

    def record(self, query: Query, replica_id: str) -> None:
        """Remember that this replica got the call."""
        ...
