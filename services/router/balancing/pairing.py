"""Matches prefill and decode replicas into PD pairs. Pure, by their leases.

The two peers of a pair have the same transfer back end, the same tensor parallelism and the same policy version: a KV
cache is decoded only by the weights that computed it. Invariant: partners are mutual.
"""

import collections
import dataclasses
from collections.abc import Container, Iterable, Mapping
from typing import TypeAlias

from penstock.v1 import common_pb2
from services.router.balancing.replica_status import PD_ROLES, UnroutableReason

MISMATCHES = (UnroutableReason.OTHER_BACKEND, UnroutableReason.OTHER_TENSOR_PARALLEL)
"""Reasons for a missing partner that need a person to fix them; the others pass, as after a push."""

_Match: TypeAlias = tuple["common_pb2.ReplicaRole.ValueType", str, int, int]
"""Role, transfer back end, tensor parallelism and policy version of a partner."""
_LACKS = (
    UnroutableReason.NO_PARTNER,
    UnroutableReason.OTHER_BACKEND,
    UnroutableReason.OTHER_TENSOR_PARALLEL,
    UnroutableReason.OTHER_VERSION,
)
"""For each part of a `_Match`: why a replica has no partner if no peer that agrees in the parts before has this one."""

_PREFILL, _DECODE = PD_ROLES
_ROLE_OF_PARTNER = {_PREFILL: _DECODE, _DECODE: _PREFILL}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Partners:
    """The partners of one replica."""

    replica_ids: tuple[str, ...] | None = None
    """Their ids; None: it needs none."""
    lack: UnroutableReason | None = None
    """Why it has none, though it needs one."""


NEEDS_NONE = Partners()
"""The partners of a replica that needs none."""


def pair_up(leases: Iterable[common_pb2.Replica]) -> Mapping[str, Partners]:
    """Return the partners of each replica, by its id; replicas with the same partners share them."""
    replicas = list(leases)
    peer_ids: dict[_Match, list[str]] = collections.defaultdict(list)
    for each in replicas:
        if each.role in _ROLE_OF_PARTNER and each.HasField("disaggregation"):
            peer_ids[_match(each, each.role)].append(each.replica_id)
    known = {match[:length] for match in peer_ids for length in range(1, len(match) + 1)}
    partners = {match: Partners(replica_ids=tuple(ids)) for match, ids in peer_ids.items()}
    found = {}
    for each in replicas:
        if each.role in _ROLE_OF_PARTNER:
            wanted = _match(each, _ROLE_OF_PARTNER[each.role])
            found[each.replica_id] = partners.get(wanted) or Partners(replica_ids=(), lack=_find_lack(wanted, known))
        else:
            found[each.replica_id] = NEEDS_NONE
    return found


def _match(replica: common_pb2.Replica, role: "common_pb2.ReplicaRole.ValueType") -> _Match:
    """Return the match of `replica` as a peer of this role, or of the peers of this role with it."""
    described = replica.disaggregation
    return role, described.transfer_backend, described.tensor_parallel, replica.policy_version


def _find_lack(wanted: _Match, known: Container[tuple[object, ...]]) -> UnroutableReason:
    """Return the reason of the first part of `wanted` with which the beginning is not `known`."""
    return next(reason for length, reason in enumerate(_LACKS, start=1) if wanted[:length] not in known)
