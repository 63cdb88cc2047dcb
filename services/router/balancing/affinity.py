"""Session affinity, and the least loaded for whoever has none yet.

Invariant: a session stays on its replica for as long as that is fit; its prefix cache holds the turns before.
"""

import collections
from collections.abc import Mapping

from services.router.balancing.balancer import find_fit
from services.router.balancing.fair_share import FairShare
from services.router.balancing.replica_status import Query, ReplicaStatus


class Sessions:
    """Which session belongs to which replica, for the `max_sessions` sessions used last."""

    def __init__(self, max_sessions: int) -> None:
        """Remember at most `max_sessions`."""
        self._max_sessions = max_sessions
        self._replica_of: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._num_of: dict[str, int] = {}

    def __len__(self) -> int:
        """Sessions remembered."""
        return len(self._replica_of)

    def get(self, session_id: str) -> str | None:
        """The session's replica, if it is remembered."""
        return self._replica_of.get(session_id)

    def num_of(self, replica_id: str) -> int:
        """Sessions that belong to the replica."""
        return self._num_of.get(replica_id, 0)

    def bind(self, session_id: str, replica_id: str) -> None:
        """From now on the session belongs to the replica; an empty session id is nobody's."""
        if not session_id:
            return
        self._drop(self._replica_of.pop(session_id, None))
        self._replica_of[session_id] = replica_id
        self._num_of[replica_id] = self.num_of(replica_id) + 1
        if len(self._replica_of) > self._max_sessions:
            self._drop(self._replica_of.popitem(last=False)[1])

    def _drop(self, replica_id: str | None) -> None:
        if replica_id is None:
            return
        self._num_of[replica_id] -= 1
        if self._num_of[replica_id] == 0:
            del self._num_of[replica_id]


class AffinityBalancer:
    """The session's own replica if it is fit; else the least loaded, and of these the one with the fewest sessions.

    Both are counted by place, and the load with the call that is to be given (shortest expected delay) and with what
    the replica has had too much or too little of late.
    """

    reads_blocks = False

    def __init__(self, *, max_sessions: int) -> None:
        """Remember the replicas of `max_sessions` sessions."""
        self.sessions = Sessions(max_sessions)
        self._surplus = FairShare()

    def choose(self, query: Query, candidates: Mapping[str, ReplicaStatus], now: float) -> ReplicaStatus | None:
        """The replica that gets the call; None exactly if none is fit."""
        own = candidates.get(self.sessions.get(query.session_id) or "")
        if own is not None and own.is_fit(query, now):
            return own
        self._surplus.look(candidates.values(), now)
        return min(find_fit(query, candidates, now), key=self._rank, default=None)

    def _rank(self, candidate: ReplicaStatus) -> tuple[float, float, str]:
        num_sessions = self.sessions.num_of(candidate.replica_id)
        load = candidate.next_load + self._surplus.load(candidate)
        return load, num_sessions / candidate.num_places, candidate.replica_id

    def record(self, query: Query, replica_id: str) -> None:
        """The session belongs to this replica from now on."""
        self.sessions.bind(query.session_id, replica_id)
