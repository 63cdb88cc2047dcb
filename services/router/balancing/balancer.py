"""What a policy is, and what several of them share."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from services.router.balancing.replica_status import Query, ReplicaStatus


class Balancer(Protocol):
    """Chooses among the replicas that are fit, and remembers what it needs for the next choice."""

    reads_blocks: bool
    """Whether it wants `Query.blocks`."""

    def choose(self, query: Query, candidates: Mapping[str, ReplicaStatus], now: float) -> ReplicaStatus | None:
        """The replica that gets the call; None exactly if none is fit."""
        ...

    def record(self, query: Query, replica_id: str) -> None:
        """The call was given to this replica."""
        ...


def find_fit(query: Query, candidates: Mapping[str, ReplicaStatus], now: float) -> list[ReplicaStatus]:
    """Those that can take the call; if there are some that take no push just now, only these."""
    fit = [candidate for candidate in candidates.values() if candidate.is_fit(query, now)]
    settled = [candidate for candidate in fit if candidate.is_settled]
    return settled or fit


def is_overloaded(candidate: ReplicaStatus, fit: Sequence[ReplicaStatus], max_ratio: float) -> bool:
    """Whether one call more would lift its load above `max_ratio` times the mean of `fit`.

    Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018), with places as weights. At least
    one of `fit` is never overloaded.
    """
    num_calls = 1 + sum(each.num_calls for each in fit)
    num_places = sum(each.num_places for each in fit)
    allowed = max_ratio * num_calls * candidate.num_places / num_places
    return candidate.num_calls >= allowed
