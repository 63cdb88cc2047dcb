"""Which prefill and decode replicas go together.

The two halves of a pair have the same transfer back end, the same tensor parallelism and the same policy version: no KV
cache is decoded by other weights than those that made it. Invariant: partners are mutual.
"""

from collections.abc import Iterable

from penstock.v1 import common_pb2
from services.router.balancing.replica_status import HALVES, UNBOUNDED, ReplicaStatus, UnroutableReason

MISMATCHES = (UnroutableReason.OTHER_BACKEND, UnroutableReason.OTHER_TENSOR_PARALLEL)
"""Reasons to stand alone that a person must mend."""


def pair_up(candidates: Iterable[ReplicaStatus]) -> list[ReplicaStatus]:
    """Find each replica's partners; after a change of the leases. Returns those that stand alone for a new reason."""
    replicas = list(candidates)
    halves = {role: [each for each in replicas if _is_half(each, role)] for role in HALVES}
    newly_lone = []
    for candidate in replicas:
        was_lone, candidate.lone = candidate.lone, None
        role = candidate.replica.role
        if role not in HALVES:
            candidate.partners = None
            continue
        others = halves[HALVES[1 - HALVES.index(role)]]
        candidate.partners, candidate.lone = (
            _find_partners(candidate, others) if others else ((), UnroutableReason.NO_PARTNER)
        )
        if candidate.lone not in (None, was_lone):
            newly_lone.append(candidate)
    return newly_lone


def sizes(candidates: Iterable[ReplicaStatus]) -> list[int]:
    """The different `max_tokens` of the replicas that tell theirs, the smallest first."""
    return sorted({each.max_tokens for each in candidates} - {UNBOUNDED})


def largest(candidates: Iterable[ReplicaStatus]) -> int:
    """The most tokens that a replica, or a pair, takes; `UNBOUNDED` if one does not say, or if there is none."""
    return max((_size(each) for each in candidates), default=UNBOUNDED)


def _size(candidate: ReplicaStatus) -> int:
    if not candidate.partners:
        return candidate.max_tokens
    return min(candidate.max_tokens, max(each.max_tokens for each in candidate.partners))


def _is_half(candidate: ReplicaStatus, role: "common_pb2.ReplicaRole.ValueType") -> bool:
    return candidate.replica.role == role and candidate.replica.HasField("disaggregation")


def _find_partners(
    candidate: ReplicaStatus, others: list[ReplicaStatus]
) -> tuple[tuple[ReplicaStatus, ...], UnroutableReason | None]:
    """Its partners among `others`, of which there is one at least; or none, and why."""
    own = candidate.replica.disaggregation
    others = [each for each in others if each.replica.disaggregation.transfer_backend == own.transfer_backend]
    if not others:
        return (), UnroutableReason.OTHER_BACKEND
    others = [each for each in others if each.replica.disaggregation.tensor_parallel == own.tensor_parallel]
    if not others:
        return (), UnroutableReason.OTHER_TENSOR_PARALLEL
    partners = tuple(each for each in others if each.policy_version == candidate.policy_version)
    return partners, None if partners else UnroutableReason.OTHER_VERSION
