"""A replica as the policies see it, what a call wants of it, and what may keep the two apart."""

import collections
import dataclasses
import enum
import sys
from collections.abc import Iterable

from penstock.v1 import common_pb2
from services.router.breaker import Breaker
from services.router.limits import Limit


class UnroutableReason(enum.Enum):
    """Why a replica cannot be given a call; the value completes "2 replicas are ..."."""

    STARTING = "starting"
    BROKEN = "broken by a push that ended half-way"
    DRAINING = "draining"
    UPDATING = "taking a push"
    ROLE = "of no role that can answer"
    NO_PARTNER = "without a partner: it takes a prefill and a decode replica to answer"
    OTHER_BACKEND = "of another transfer_backend than its partners"
    OTHER_TENSOR_PARALLEL = (
        "of another tensor_parallel than its partners: SGLang cannot move a KV cache between unequal ones"
    )
    OTHER_VERSION = "without a partner of its policy version"
    SMALL = "too small for it"
    STALE = "below policy version"
    TRIED = "tried already"
    FAILING = "failing or not reachable"
    PARTNERS_UNFIT = "without a partner that can take calls"
    PARTNERS_FULL = "without a partner that has places left"
    FULL = "at the limit of calls"
    REFUSING = "refusing calls"


PASSING = frozenset((UnroutableReason.UPDATING, UnroutableReason.PARTNERS_FULL, UnroutableReason.FULL))
"""What goes away by itself, for certain: worth waiting for until a call's deadline."""

HALVES = (common_pb2.REPLICA_ROLE_PREFILL, common_pb2.REPLICA_ROLE_DECODE)
"""Roles that answer in pairs only."""

UNBOUNDED = sys.maxsize
"""The `max_tokens` of a replica that does not say."""

_OBSTACLE_OF_STATE = {
    common_pb2.REPLICA_STATE_UNSPECIFIED: UnroutableReason.STARTING,
    common_pb2.REPLICA_STATE_STARTING: UnroutableReason.STARTING,
    common_pb2.REPLICA_STATE_BROKEN: UnroutableReason.BROKEN,
    common_pb2.REPLICA_STATE_DRAINING: UnroutableReason.DRAINING,
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
    num_tokens: int = 0
    """Tokens that it takes at least: its prompt's ids, and one. 0: not known."""
    num_small: int = 0
    """How many of the sizes that replicas have (`pairing.sizes`) are too small for `num_tokens`."""

    @property
    def need(self) -> tuple[int, frozenset[str], int]:
        """Calls of equal needs can be taken by the same replicas, whatever the policy prefers."""
        return self.min_version, self.excluded, self.num_small


class ReplicaStatus:
    """A replica that holds its lease, kept up to date in place: choosing reads all of them for every new session.

    Policies choose among those that read prompts: unified and prefill replicas, for a session's prefix cache is there.
    A prefill replica is fit together with one of its partners, and then it is the least loaded partner that decodes.
    """

    __slots__ = (
        "breaker",
        "is_settled",
        "limit",
        "lone",
        "max_tokens",
        "num_elsewhere",
        "num_in_flight",
        "num_places",
        "obstacle",
        "partners",
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
        self.partners: tuple[ReplicaStatus, ...] | None = () if replica.role in HALVES else None
        """The replicas with which it makes a pair, as `pairing.pair_up` finds them; None if it needs none."""
        self.lone: UnroutableReason | None = None if self.partners is None else UnroutableReason.NO_PARTNER
        """Why it has no partners."""
        self.update(replica)
        self.was_settled = self.is_settled
        """Whether it took no push when its limit was adapted last."""

    def update(self, replica: common_pb2.Replica) -> None:
        """Its lease says something new."""
        self.replica = replica
        self.policy_version = replica.policy_version
        self.obstacle: UnroutableReason | None = _OBSTACLE_OF_STATE.get(replica.state)
        """What its lease says against it, versions aside."""
        if replica.role in HALVES:
            if not replica.HasField("disaggregation"):
                self.obstacle = self.obstacle or UnroutableReason.ROLE
            elif replica.state == common_pb2.REPLICA_STATE_UPDATING:
                # It would take no call before the push is over, and then have another version than the pair.
                self.obstacle = UnroutableReason.UPDATING
        elif replica.role != common_pb2.REPLICA_ROLE_UNIFIED:
            self.obstacle = self.obstacle or UnroutableReason.ROLE
        self.max_tokens = replica.max_tokens or UNBOUNDED
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
    def num_calls(self) -> int:
        """What it has to do: this router's calls, and those of others."""
        return self.num_in_flight + self.num_elsewhere

    @property
    def own_load(self) -> float:
        """Calls per place."""
        return self.num_calls / self.num_places

    @property
    def load(self) -> float:
        """The same, and where a pair would answer, with what its least loaded partner has: a call uses up both."""
        if not self.partners:
            return self.own_load
        return self.own_load + min(each.own_load for each in self.partners)

    @property
    def next_load(self) -> float:
        """Its load with one call more. By the load without it, small replicas come to have more per place than large
        ones: each is filled to the same level, and beyond it by one call."""
        if not self.partners:
            return self._own_next_load
        return self._own_next_load + min(each._own_next_load for each in self.partners)

    @property
    def _own_next_load(self) -> float:
        return self.own_load + 1 / self.num_places

    @property
    def is_open(self) -> bool:
        """Whether it takes calls as long as it is not full, and takes no push just now."""
        return self.obstacle is None and self.lone is None and self.is_settled

    @property
    def reads_prompts(self) -> bool:
        """Whether policies choose it, alone or for a pair."""
        return self.partners is None or self.is_prefill

    @property
    def is_prefill(self) -> bool:
        """Whether it reads prompts for partners that decode."""
        return self.replica.role == common_pb2.REPLICA_ROLE_PREFILL

    def is_fit(self, query: Query, now: float) -> bool:
        """Whether a policy may choose it: nothing keeps the call away from it, nor from all that would decode."""
        return (
            self.reads_prompts
            and self.is_able(query, now)
            and (self.partners is None or any(each.is_able(query, now) for each in self.partners))
        )

    def is_able(self, query: Query, now: float) -> bool:
        """Whether nothing keeps the call away from this replica, partners aside."""
        return (
            self.obstacle is None
            and self.lone is None
            and self.policy_version >= query.min_version
            and self.max_tokens >= query.num_tokens
            and self.num_in_flight < self.limit.max_in_flight
            and self.refusing_until <= now
            and self.replica_id not in query.excluded
            and self.breaker.allows(now)
        )

    def find_partner(self, query: Query, now: float) -> "ReplicaStatus | None":
        """The partner that takes the other half of the call: the least loaded of those that can."""
        able = (each for each in self.partners or () if each.is_able(query, now))
        return min(able, key=lambda each: (each._own_next_load, each.replica_id), default=None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoReplica:
    """Nobody can take the call now, and why."""

    reasons: dict[UnroutableReason, int]
    """How many replicas each obstacle keeps away; empty when none is registered."""
    min_version: int
    """The policy version that was wanted."""
    newest_version: int
    """The newest policy version among the replicas; 0 when there is none."""

    def __str__(self) -> str:
        """One clause for an error message."""
        if not self.reasons:
            return "no replica is registered; start one with `penstock serve rollout`"
        total = sum(self.reasons.values())
        if len(self.reasons) == 1:
            return f"{f'all {total} replicas are' if total > 1 else 'the only replica is'} {self._tell(*self.reasons)}"
        return f"of {total} replicas " + ", ".join(f"{n} {self._tell(which)}" for which, n in self.reasons.items())

    def _tell(self, obstacle: UnroutableReason) -> str:
        if obstacle is UnroutableReason.STALE:
            return f"{obstacle.value} {self.min_version} (newest {self.newest_version})"
        return str(obstacle.value)


def find_reason(candidate: ReplicaStatus, query: Query, now: float) -> UnroutableReason | None:
    """What keeps the call away from the replica, or from all its partners; None exactly when it can take (part of) it.
    What lasts longest is named first."""
    own = _find_own_obstacle(candidate, query, now)
    if candidate.partners is None or own not in (None, UnroutableReason.FULL):
        return own
    theirs = {_find_own_obstacle(each, query, now) for each in candidate.partners}
    if None in theirs:
        return own
    return own or UnroutableReason.PARTNERS_FULL if UnroutableReason.FULL in theirs else UnroutableReason.PARTNERS_UNFIT


def _find_own_obstacle(candidate: ReplicaStatus, query: Query, now: float) -> UnroutableReason | None:
    if candidate.obstacle is not None:
        return candidate.obstacle
    if candidate.lone is not None:
        return candidate.lone
    if candidate.max_tokens < query.num_tokens:
        return UnroutableReason.SMALL
    if candidate.policy_version < query.min_version:
        return UnroutableReason.STALE
    if not candidate.breaker.allows(now):
        return UnroutableReason.FAILING
    if candidate.replica_id in query.excluded:
        return UnroutableReason.TRIED
    if candidate.num_in_flight >= candidate.limit.max_in_flight:
        return UnroutableReason.FULL
    return UnroutableReason.REFUSING if candidate.refusing_until > now else None


def explain(candidates: Iterable[ReplicaStatus], query: Query, now: float) -> NoReplica:
    """Why none of the replicas can take the call."""
    reasons: collections.Counter[UnroutableReason] = collections.Counter()
    newest_version = 0
    for candidate in candidates:
        newest_version = max(newest_version, candidate.policy_version)
        obstacle = find_reason(candidate, query, now)
        if obstacle is not None:
            reasons[obstacle] += 1
    return NoReplica(reasons=dict(reasons), min_version=query.min_version, newest_version=newest_version)
