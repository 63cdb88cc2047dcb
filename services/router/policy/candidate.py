"""A replica as the policies see it, what a call wants of it, and what may keep the two apart."""

import collections
import dataclasses
import enum
from collections.abc import Iterable

from penstock.v1 import common_pb2
from services.router.breaker import Breaker
from services.router.limits import Limit


class Obstacle(enum.Enum):
    """Why a replica cannot be given a call; the value completes "2 replicas are ..."."""

    STARTING = "starting"
    BROKEN = "broken by a push that ended half-way"
    DRAINING = "draining"
    ROLE = "of a role that answers no whole requests"
    STALE = "below policy version"
    TRIED = "tried already"
    FAILING = "failing or not reachable"
    REFUSING = "refusing calls"
    FULL = "at the limit of calls"


_OBSTACLE_OF_STATE = {
    common_pb2.REPLICA_STATE_UNSPECIFIED: Obstacle.STARTING,
    common_pb2.REPLICA_STATE_STARTING: Obstacle.STARTING,
    common_pb2.REPLICA_STATE_BROKEN: Obstacle.BROKEN,
    common_pb2.REPLICA_STATE_DRAINING: Obstacle.DRAINING,
}


@dataclasses.dataclass(slots=True, kw_only=True)
class Query:
    """What a call wants now: the bound on versions rises while it waits, and replicas that fail it are excluded."""

    session_id: str = ""
    """Calls of one session belong together; empty: to none."""
    request_id: str = ""
    """What stands in for the session where there is none."""
    min_version: int = 0
    """The oldest policy version that may answer."""
    excluded: frozenset[str] = frozenset()
    """Ids of replicas that failed this very call."""
    blocks: tuple[int, ...] = ()
    """What `prefix.hash_blocks` makes of the prompt, if the policy wants it."""

    @property
    def need(self) -> tuple[int, frozenset[str]]:
        """Calls of equal needs can be taken by the same replicas, whatever the policy prefers."""
        return self.min_version, self.excluded


class Candidate:
    """A replica that holds its lease, kept up to date in place: choosing reads all of them for every new session."""

    __slots__ = (
        "breaker",
        "is_settled",
        "limit",
        "num_elsewhere",
        "num_in_flight",
        "num_places",
        "obstacle",
        "policy_version",
        "refusing_until",
        "replica",
        "replica_id",
        "was_settled",
    )

    def __init__(self, replica: common_pb2.Replica, *, limit: Limit, breaker: Breaker) -> None:
        """Begin with what its lease says."""
        self.replica_id = replica.replica_id
        self.limit = limit
        self.breaker = breaker
        self.num_in_flight = 0
        """Calls that this router has with it, and places that it gave out."""
        self.refusing_until = 0.0
        """Until when it is left alone, for it turned a call away."""
        self.update(replica)
        self.was_settled = self.is_settled
        """Whether it took no push when its limit was adapted last."""

    def update(self, replica: common_pb2.Replica) -> None:
        """Its lease says something new."""
        self.replica = replica
        self.policy_version = replica.policy_version
        self.obstacle: Obstacle | None = _OBSTACLE_OF_STATE.get(replica.state)
        """What its lease says against it, versions aside."""
        if self.obstacle is None and replica.role != common_pb2.REPLICA_ROLE_UNIFIED:
            self.obstacle = Obstacle.ROLE
        self.is_settled = replica.state == common_pb2.REPLICA_STATE_READY
        """Not taking a push."""
        self.num_places = max(1, replica.max_running)
        self.num_elsewhere = max(0, replica.num_running + replica.num_queued - self.num_in_flight)
        """What it reports beyond this router's own calls: those of others. Own calls are known without the delay."""

    def adapt_limit(self) -> None:
        """Let the limit follow what the lease says now; as often as leases are renewed.

        During a push all calls are queued, and just after it the lease may still say so: that is no load.
        """
        was_settled, self.was_settled = self.was_settled, self.is_settled
        if self.is_settled and was_settled:
            said = self.replica
            self.limit.report(max_running=said.max_running, num_queued=said.num_queued, kv_use=said.kv_use)

    @property
    def load(self) -> float:
        """Calls per place."""
        return (self.num_in_flight + self.num_elsewhere) / self.num_places

    def is_fit(self, query: Query, now: float) -> bool:
        """Whether nothing keeps the call away."""
        return (
            self.obstacle is None
            and self.policy_version >= query.min_version
            and self.num_in_flight < self.limit.places
            and self.refusing_until <= now
            and self.replica_id not in query.excluded
            and self.breaker.allows(now)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoReplica:
    """Nobody can take the call now, and why."""

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


def find_obstacle(candidate: Candidate, query: Query, now: float) -> Obstacle | None:
    """What keeps the call away from the replica; None exactly when it is fit. What lasts longest is named first."""
    if candidate.obstacle is not None:
        return candidate.obstacle
    if candidate.policy_version < query.min_version:
        return Obstacle.STALE
    if not candidate.breaker.allows(now):
        return Obstacle.FAILING
    if candidate.replica_id in query.excluded:
        return Obstacle.TRIED
    if candidate.refusing_until > now:
        return Obstacle.REFUSING
    return Obstacle.FULL if candidate.num_in_flight >= candidate.limit.places else None


def explain(candidates: Iterable[Candidate], query: Query, now: float) -> NoReplica:
    """Why none of the replicas can take the call."""
    obstacles: collections.Counter[Obstacle] = collections.Counter()
    newest_version = 0
    for candidate in candidates:
        newest_version = max(newest_version, candidate.policy_version)
        obstacle = find_obstacle(candidate, query, now)
        if obstacle is not None:
            obstacles[obstacle] += 1
    return NoReplica(obstacles=dict(obstacles), min_version=query.min_version, newest_version=newest_version)
