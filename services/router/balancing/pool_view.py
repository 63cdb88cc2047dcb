"""All replicas at one moment, and which of them can take a given call. Pure: time is passed in.

Invariants: a replica that `find_fit` returns is alive, takes calls, is large enough and has at least the wanted policy
version; a prefill replica has a partner with the same properties. Replicas that are held out of pushes answer only an
evaluation's calls.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from penstock.v1 import common_pb2
from services.router.balancing.replica_status import UNBOUNDED, ReplicaStatus, UnroutableReason

Need: TypeAlias = tuple[int, int, bool, frozenset[str], int, str]


@dataclasses.dataclass(slots=True, kw_only=True)
class Query:
    """A call's current needs: while it waits, the version bound rises and failed replicas are excluded."""

    session_id: str = ""
    """Calls of one session belong together; empty: no session."""
    group_id: str = ""
    """Sessions of one group begin with the same prompt; empty: no group."""
    shared_prompt: int = 0
    """Equal for calls of one group with equal prompts; 0: no group."""
    request_id: str = ""
    """Replaces the session where there is none."""
    min_version: int = 0
    """Oldest policy version that may answer."""
    exact_version: int = 0
    """The only policy version that may answer, for evaluations; 0: any from `min_version` on."""
    wants_held_out: bool = False
    """Whether only replicas that are held out of pushes may answer: with `exact_version`, while an evaluation holds
    some."""
    reports_prompt: bool = False
    """Whether its answer reports on the prompt's own tokens, which PD pairs refuse."""
    wants_unified: bool = False
    """Whether only replicas that are no peers of PD pairs may answer: it `reports_prompt`, and there are some."""
    excluded: frozenset[str] = frozenset()
    """Ids of replicas that failed this call."""
    blocks: tuple[int, ...] = ()
    """`prefix.hash_blocks` of the prompt, if the balancer wants it."""
    num_tokens: int = 0
    """Minimum tokens that it needs: those of its prompt, and one. 0: unknown."""
    num_small: int = 0
    """Number of the pool's sizes (`PoolView.sizes`) that are too small for `num_tokens`."""

    home: str = ""
    """Id of the replica in whose queue it waits, as `Balancer.find_home` returned it; empty: any will do. See
    balancer.py."""

    @property
    def need(self) -> "Need":
        """Key of the call's needs: the same replicas can take calls of equal needs."""
        return self.exact_version, self.min_version, self.wants_unified, self.excluded, self.num_small, self.home


class PoolView:
    """The replicas by id, with the pairs that they form.

    Hundreds of replicas may have the same partners, which are looked at once for all of them.
    """

    __slots__ = ("_with_room", "replicas")

    def __init__(
        self, replicas: Mapping[str, ReplicaStatus], with_room: Mapping[str, ReplicaStatus] | None = None
    ) -> None:
        """View `replicas`; the mappings' owner replaces their immutable values.

        Args:
            replicas: By id.
            with_room: Those of them that have `has_room`, so that a full pool is not searched for each call that waits;
                None: not known.
        """
        self.replicas = replicas
        self._with_room = replicas if with_room is None else with_room

    def is_fit(self, replica: ReplicaStatus, query: Query, now: float) -> bool:
        """Return whether balancers may choose the replica: it can take the call, and so can a partner if needed."""
        return bool(self._select_fit((replica,), query, now))

    def find_fit(self, query: Query, now: float) -> list[ReplicaStatus]:
        """Return the replicas that can take the call; if some of them take no push at the moment, only those."""
        fit = self._select_fit(self._with_room.values(), query, now)
        return [each for each in fit if each.is_settled] or fit

    def find_partner(self, replica: ReplicaStatus, query: Query, now: float) -> ReplicaStatus | None:
        """Return the least loaded partner that can take the other part of the call; None if none can."""
        able = (each for each in self._present(replica.partner_ids) if _is_able(each, query, now))
        return min(able, key=lambda each: (each.next_load, each.replica_id), default=None)

    def loads(self, replicas: Sequence[ReplicaStatus]) -> dict[str, float]:
        """Return each replica's calls per slot, by its id; for a pair plus the least loaded partner's load, because a
        call takes both slots."""
        return self._add_partners(replicas, lambda each: each.load)

    def next_loads(self, replicas: Sequence[ReplicaStatus]) -> dict[str, float]:
        """Return the loads with one more call. Ranking without that call would fill all replicas to the same level
        first, and then small ones further than large ones, because one more call is a larger share of a small one."""
        return self._add_partners(replicas, lambda each: each.next_load)

    def has_unified(self, num_tokens: int) -> bool:
        """Return whether a replica that needs no partner takes calls of `num_tokens` tokens, now or later."""
        return any(
            each.role == common_pb2.REPLICA_ROLE_UNIFIED and each.max_tokens >= num_tokens
            for each in self.replicas.values()
        )

    def sizes(self) -> list[int]:
        """Return the distinct `max_tokens` in the leases, in ascending order."""
        return sorted({each.max_tokens for each in self.replicas.values()} - {UNBOUNDED})

    def largest(self) -> int:
        """Return the maximum tokens of any replica or pair; `UNBOUNDED` if a lease has none, or without replicas."""
        replicas = self.replicas.values()
        of_partners = {
            partner_ids: max((each.max_tokens for each in self._present(partner_ids)), default=UNBOUNDED)
            for partner_ids in {each.partner_ids for each in replicas}
        }
        return max((min(each.max_tokens, of_partners[each.partner_ids]) for each in replicas), default=UNBOUNDED)

    def find_reason(self, replica: ReplicaStatus, query: Query, now: float) -> UnroutableReason | None:
        """Return why neither the replica nor its partners can take (their part of) the call; None exactly if they can.
        The reason that will last longest comes first."""
        own = _find_own_reason(replica, query, now)
        if replica.partner_ids is None or own not in (None, UnroutableReason.FULL):
            return own
        theirs = {_find_own_reason(each, query, now) for each in self._present(replica.partner_ids)}
        if None in theirs:
            return own
        if UnroutableReason.FULL in theirs:
            return own or UnroutableReason.PARTNERS_FULL
        return UnroutableReason.PARTNERS_UNFIT

    def explain(self, query: Query, now: float) -> "NoReplica":
        """Return why no replica can take the call."""
        reasons = collections.Counter(self.find_reason(each, query, now) for each in self.replicas.values())
        return NoReplica(
            reasons={reason: count for reason, count in reasons.items() if reason is not None},
            min_version=query.exact_version or query.min_version,
            newest_version=max((each.policy_version for each in self.replicas.values()), default=0),
        )

    def _select_fit(self, replicas: Iterable[ReplicaStatus], query: Query, now: float) -> list[ReplicaStatus]:
        able = [each for each in replicas if each.reads_prompts and _is_able(each, query, now)]
        complete = {
            partner_ids
            for partner_ids in {each.partner_ids for each in able}
            if partner_ids is None or any(_is_able(each, query, now) for each in self._present(partner_ids))
        }
        return [each for each in able if each.partner_ids in complete]

    def _add_partners(
        self, replicas: Sequence[ReplicaStatus], load_of: Callable[[ReplicaStatus], float]
    ) -> dict[str, float]:
        """Return each replica's load plus the least of its partners'."""
        least = {
            partner_ids: min(map(load_of, self._present(partner_ids)), default=0.0)
            for partner_ids in {each.partner_ids for each in replicas}
        }
        return {each.replica_id: load_of(each) + least[each.partner_ids] for each in replicas}

    def _present(self, partner_ids: tuple[str, ...] | None) -> Iterator[ReplicaStatus]:
        """Yield the partners that are in the pool."""
        for partner_id in partner_ids or ():
            partner = self.replicas.get(partner_id)
            if partner is not None:
                yield partner


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoReplica:
    """Why no replica can take a call."""

    reasons: dict[UnroutableReason, int]
    """Number of replicas by reason; empty if none is registered."""
    min_version: int
    """The wanted policy version."""
    newest_version: int
    """The newest policy version in the pool; 0 without replicas."""

    def __str__(self) -> str:
        """Return one clause for an error message."""
        if not self.reasons:
            return "no replica is registered; start one with `penstock serve rollout`"
        total = sum(self.reasons.values())
        if len(self.reasons) == 1:
            return f"{f'all {total} replicas are' if total > 1 else 'the only replica is'} {self._name(*self.reasons)}"
        return f"of {total} replicas " + ", ".join(f"{n} {self._name(which)}" for which, n in self.reasons.items())

    def _name(self, reason: UnroutableReason) -> str:
        if reason in (UnroutableReason.STALE, UnroutableReason.OTHER_THAN_EXACT):
            return f"{reason.value} {self.min_version} (newest {self.newest_version})"
        return str(reason.value)


def is_overloaded(replica: ReplicaStatus, fit: Sequence[ReplicaStatus], max_ratio: float) -> bool:
    """Return whether one more call would raise the replica's load above `max_ratio` times the mean of `fit`.

    Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018), weighted by max_running. At least
    one of `fit` is never overloaded.
    """
    num_calls = 1 + sum(each.num_calls for each in fit)
    max_running = sum(each.max_running for each in fit)
    return replica.num_calls >= max_ratio * num_calls * replica.max_running / max_running


def _is_able(replica: ReplicaStatus, query: Query, now: float) -> bool:
    """Return whether `_find_own_reason` finds none; written out because every new session asks it of every replica."""
    return (
        replica.unroutable is None
        and replica.policy_version >= query.min_version
        and (not (replica.is_held_out or query.exact_version) or _is_meant_for(replica, query))
        and not (query.wants_unified and replica.partner_ids is not None)
        and replica.max_tokens >= query.num_tokens
        and replica.num_in_flight < replica.max_in_flight
        and replica.rejecting_until <= now
        and replica.replica_id not in query.excluded
        and replica.failing_until <= now
    )


def _is_meant_for(replica: ReplicaStatus, query: Query) -> bool:
    """Return whether the evaluation, if one holds replicas out of pushes, lets this replica answer this call."""
    if not query.exact_version:
        return not replica.is_held_out
    return replica.policy_version == query.exact_version and (replica.is_held_out or not query.wants_held_out)


def _find_own_reason(replica: ReplicaStatus, query: Query, now: float) -> UnroutableReason | None:
    if replica.unroutable is not None:
        return replica.unroutable
    if query.wants_unified and replica.partner_ids is not None:
        return UnroutableReason.PAIRED
    if replica.max_tokens < query.num_tokens:
        return UnroutableReason.SMALL
    if replica.policy_version < query.min_version:
        return UnroutableReason.STALE
    if not _is_meant_for(replica, query):
        if not query.exact_version:
            return UnroutableReason.HELD_OUT
        is_exact = replica.policy_version == query.exact_version
        return UnroutableReason.NOT_HELD_OUT if is_exact else UnroutableReason.OTHER_THAN_EXACT
    if replica.failing_until > now:
        return UnroutableReason.FAILING
    if replica.replica_id in query.excluded:
        return UnroutableReason.TRIED
    if replica.num_in_flight >= replica.max_in_flight:
        return UnroutableReason.FULL
    return UnroutableReason.REJECTING if replica.rejecting_until > now else None
