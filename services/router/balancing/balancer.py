"""The interface of balancers.

Two words name a replica that should get a call because it has the beginning of the prompt:

    own     where the call's session, or else its group, was sent last, as the balancer remembers it at this moment
    home    `Query.home`: what `find_home` returned when the call was last measured, its own replica of that moment. The
            call waits in this replica's queue

They are the same replica until the call's group moves on while the call waits.
"""

from typing import Protocol

from services.router.balancing.pool_view import PoolView, Query
from services.router.balancing.replica_status import ReplicaStatus


class Balancer(Protocol):
    """Chooses among the replicas that can take a call, using the view and its memory of its own choices."""

    reads_blocks: bool
    """Whether it uses `Query.blocks`."""

    def choose(self, query: Query, pool: PoolView, now: float) -> ReplicaStatus | None:
        """Return the replica that gets the call; None exactly if none is fit, or if the call waits for its own."""
        ...

    def find_home(self, query: Query, pool: PoolView, now: float) -> tuple[str, bool]:
        """Return the id of the call's own replica, which should get it even if others could, and whether the call must
        wait because that replica is full; an empty id and False if any replica will do."""
        ...

    def record(self, query: Query, replica_id: str) -> None:
        """Remember that this replica got the call."""
        ...
