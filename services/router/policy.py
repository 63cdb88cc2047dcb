"""Which replica gets a request. Pure: no clock, no network.

Invariant: what `choose` returns is alive, able to take requests and at least of the wanted policy version; a session
stays on its replica for as long as that replica is all of this.
"""

import collections
import dataclasses
import enum
from collections.abc import Container, Iterable

from penstock.v1 import common_pb2


class Obstacle(enum.Enum):
    """Why a replica cannot be given a request; the value completes "2 replicas ..."."""

    STARTING = "starting"
    BROKEN = "broken by a push that ended half-way"
    DRAINING = "draining"
    ROLE = "of a role that answers no whole requests"
    STALE = "below policy version"
    UNREACHABLE = "not reachable"
    TRIED = "tried already"


_OBSTACLE_OF_STATE = {
    common_pb2.REPLICA_STATE_UNSPECIFIED: Obstacle.STARTING,
    common_pb2.REPLICA_STATE_STARTING: Obstacle.STARTING,
    common_pb2.REPLICA_STATE_BROKEN: Obstacle.BROKEN,
    common_pb2.REPLICA_STATE_DRAINING: Obstacle.DRAINING,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica that holds its lease."""

    replica: common_pb2.Replica
    """What it says of itself."""
    num_in_flight: int = 0
    """Requests that this router has with it."""
    reachable: bool = True
    """False for a while after a connection to it failed."""

    @property
    def load(self) -> float:
        """Requests per place. What it reports lags behind, what this router sent does not; so they are added."""
        reported = self.replica.num_running + self.replica.num_queued
        return (self.num_in_flight + reported) / max(1, self.replica.max_running)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoReplica:
    """Nobody can take the request now, and why."""

    obstacles: dict[Obstacle, int]
    """How many replicas each obstacle keeps away; empty when none is registered."""
    min_version: int
    """The policy version that was wanted."""
    newest_version: int
    """The newest policy version among the replicas; 0 when there is none."""

    def __str__(self) -> str:
        """One clause for an error message."""
        if not self.obstacles:
            return "no replica is registered; start one with `penstock serve rollout`"
        total = sum(self.obstacles.values())
        if len(self.obstacles) == 1:
            return (
                f"{f'all {total} replicas are' if total > 1 else 'the only replica is'} {self._tell(*self.obstacles)}"
            )
        return f"of {total} replicas " + ", ".join(f"{n} {self._tell(which)}" for which, n in self.obstacles.items())

    def _tell(self, obstacle: Obstacle) -> str:
        if obstacle is Obstacle.STALE:
            return f"{obstacle.value} {self.min_version} (newest {self.newest_version})"
        return str(obstacle.value)


class Affinity:
    """Which session belongs to which replica, for the `max_sessions` sessions used last."""

    def __init__(self, max_sessions: int) -> None:
        """Remember at most `max_sessions`."""
        self._max_sessions = max_sessions
        self._replica_of: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._num_sessions: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        """Sessions remembered."""
        return len(self._replica_of)

    def get(self, session_id: str) -> str | None:
        """The session's replica, if it is remembered."""
        return self._replica_of.get(session_id)

    def num_sessions(self, replica_id: str) -> int:
        """Sessions that belong to the replica."""
        return self._num_sessions[replica_id]

    def bind(self, session_id: str, replica_id: str) -> None:
        """From now on the session belongs to the replica; an empty session id is nobody's."""
        if not session_id:
            return
        self._drop(self._replica_of.pop(session_id, None))
        self._replica_of[session_id] = replica_id
        self._num_sessions[replica_id] += 1
        if len(self._replica_of) > self._max_sessions:
            self._drop(self._replica_of.popitem(last=False)[1])

    def _drop(self, replica_id: str | None) -> None:
        if replica_id is None:
            return
        self._num_sessions[replica_id] -= 1
        if self._num_sessions[replica_id] == 0:
            del self._num_sessions[replica_id]


def find_obstacle(candidate: Candidate, min_version: int) -> Obstacle | None:
    """What keeps requests that want `min_version` away from the replica; None when nothing does."""
    replica = candidate.replica
    if replica.state in _OBSTACLE_OF_STATE:
        return _OBSTACLE_OF_STATE[replica.state]
    if replica.role != common_pb2.REPLICA_ROLE_UNIFIED:
        return Obstacle.ROLE
    if replica.policy_version < min_version:
        return Obstacle.STALE
    return None if candidate.reachable else Obstacle.UNREACHABLE


def choose(
    candidates: Iterable[Candidate],
    affinity: Affinity,
    *,
    session_id: str,
    min_version: int,
    excluded: Container[str] = (),
) -> str | NoReplica:
    """The id of the replica that gets the request, or why none does. Does not bind the session.

    The session's own replica if it can; else one that is not taking a push, if there is one; of these the least
    loaded, then the one with the fewest sessions.

    Args:
        candidates: The replicas that hold their lease.
        min_version: The oldest policy version that may answer.
        excluded: Ids of replicas that failed this very request.
    """
    routable: list[Candidate] = []
    obstacles: collections.Counter[Obstacle] = collections.Counter()
    newest_version = 0
    for candidate in candidates:
        newest_version = max(newest_version, candidate.replica.policy_version)
        obstacle = find_obstacle(candidate, min_version)
        if obstacle is None and candidate.replica.replica_id in excluded:
            obstacle = Obstacle.TRIED
        if obstacle is None:
            routable.append(candidate)
        else:
            obstacles[obstacle] += 1
    if not routable:
        return NoReplica(obstacles=dict(obstacles), min_version=min_version, newest_version=newest_version)
    own = affinity.get(session_id)
    if any(candidate.replica.replica_id == own for candidate in routable):
        assert own is not None
        return own

    def rank(candidate: Candidate) -> tuple[bool, float, int, str]:
        replica = candidate.replica
        busy = replica.state != common_pb2.REPLICA_STATE_READY
        return (busy, candidate.load, affinity.num_sessions(replica.replica_id), replica.replica_id)

    return min(routable, key=rank).replica.replica_id
