"""Consistent hashing of the session's id, with bounded load.

Weighted rendezvous hashing: each replica draws a number for the session, and the highest wins. Whoever computes it
comes to the same answer without having seen the session before, so several routers agree; and when a replica joins or
leaves, only the sessions that it wins or loses move.
"""

import functools
import hashlib
import math
from collections.abc import Mapping

from services.router.balancing.balancer import find_fit, is_overloaded
from services.router.balancing.replica_status import Query, ReplicaStatus

_HASH_RANGE = 2.0**64


class ConsistentHashBalancer:
    """The replica with the highest number that is fit and not overloaded; places are weights."""

    reads_blocks = False

    def __init__(self, *, max_load_ratio: float) -> None:
        """Pass over replicas with more than `max_load_ratio` times the mean load."""
        self._max_load_ratio = max_load_ratio

    def choose(self, query: Query, candidates: Mapping[str, ReplicaStatus], now: float) -> ReplicaStatus | None:
        """The replica that gets the call; None exactly if none is fit."""
        fit = find_fit(query, candidates, now)
        key = (query.session_id or query.request_id).encode()
        ranked = sorted(fit, key=lambda each: draw(key, each.replica_id, each.num_places), reverse=True)
        for candidate in ranked:
            if not is_overloaded(candidate, fit, self._max_load_ratio):
                return candidate
        return None

    def record(self, query: Query, replica_id: str) -> None:
        """Nothing needs to be remembered."""


def draw(key: bytes, replica_id: str, weight: int) -> float:
    """The replica's number for the key: highest with a probability in proportion to `weight`.

    -weight / ln(u) with u uniform in (0, 1) (Schindelhauer and Schomaker, 2005).
    """
    digest = hashlib.blake2b(key, digest_size=8, key=_hash_key(replica_id)).digest()
    uniform = (int.from_bytes(digest, "little") + 0.5) / _HASH_RANGE
    return -weight / math.log(min(uniform, 1 - 2.0**-53))


@functools.lru_cache(maxsize=4096)
def _hash_key(replica_id: str) -> bytes:
    return hashlib.blake2b(replica_id.encode(), digest_size=16).digest()
