"""Consistent hashing of the group id, or else of the session id or the request id, with bounded load.

Weighted rendezvous hashing: each replica draws a number for the id, and the highest wins. Every router computes the
same winner, even for a new group. When a replica joins or leaves, only the groups that it wins or loses move.
"""

import functools
import hashlib
import math

from services.router.balancing.pool_view import PoolView, Query, is_overloaded
from services.router.balancing.replica_status import ReplicaStatus

_HASH_RANGE = 2.0**64


class ConsistentHashBalancer:
    """Chooses the fit replica with the highest number that is not overloaded; weights are max_running."""

    reads_blocks = False

    def __init__(self, *, max_load_ratio: float) -> None:
        """Skip replicas with more than `max_load_ratio` times the mean load."""
        self._max_load_ratio = max_load_ratio

    def choose(self, query: Query, pool: PoolView, now: float) -> ReplicaStatus | None:
        """Return the replica that gets the call; None exactly if none is fit."""
        fit = pool.find_fit(query, now)
        key = (query.group_id or query.session_id or query.request_id).encode()
        ranked = sorted(fit, key=lambda each: _draw(key, each.replica_id, each.max_running), reverse=True)
        return next((each for each in ranked if not is_overloaded(each, fit, self._max_load_ratio)), None)

    def find_home(self, query: Query, pool: PoolView, now: float) -> tuple[str, bool]:
        """Return no home: no call waits while a replica can take it."""
        return "", False

    def record(self, query: Query, replica_id: str) -> None:
        """Remember nothing."""


def _draw(key: bytes, replica_id: str, weight: int) -> float:
    """Return the replica's number for the key: the highest with a probability proportional to `weight`.

    -weight / ln(u) with u uniform in (0, 1) (Schindelhauer and Schomaker, 2005).
    """
    digest = hashlib.blake2b(key, digest_size=8, key=_hash_key(replica_id)).digest()
    uniform = (int.from_bytes(digest, "little") + 0.5) / _HASH_RANGE
    return -weight / math.log(min(uniform, 1 - 2.0**-53))


@functools.lru_cache(maxsize=4096)
def _hash_key(replica_id: str) -> bytes:
    return hashlib.blake2b(replica_id.encode(), digest_size=16).digest()
