"""Matches prefill and decode replicas into PD pairs. Pure, by their leases.

The two peers of a pair have the same transfer back end, the same tensor parallelism and the same policy version: a KV
cache is decoded only by the weights that computed it. Invariant: partners are mutual.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from penstock.v1 import common_pb2
from services.router.balancing.replica_status import PD_ROLES, UnroutableReason

MISMATCHES = (UnroutableReason.OTHER_BACKEND, UnroutableReason.OTHER_TENSOR_PARALLEL)
"""Reasons for a missing partner that need a person to fix them; the others pass, as after a push."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Partners:
    """The partners of one replica."""

    replica_ids: tuple[str, ...] | None = None
    """Their ids; None: it needs none."""
    lack: UnroutableReason | None = None
    """Why it has none, though it needs one."""


def pair_up(leases: Iterable[common_pb2.Replica]) -> Mapping[str, Partners]:
    """Return the partners of each replica, by its id."""
    replicas = list(leases)
    peers = {role: [each for each in replicas if _is_peer(each, role)] for role in PD_ROLES}
    prefill, decode = PD_ROLES
    others = {prefill: peers[decode], decode: peers[prefill]}
    return {each.replica_id: _find_partners(each, others.get(each.role)) for each in replicas}


def _is_peer(replica: common_pb2.Replica, role: "common_pb2.ReplicaRole.ValueType") -> bool:
    return replica.role == role and replica.HasField("disaggregation")


def _find_partners(replica: common_pb2.Replica, others: Sequence[common_pb2.Replica] | None) -> Partners:
    if others is None:
        return Partners()
    own = replica.disaggregation
    if not others:
        return Partners(replica_ids=(), lack=UnroutableReason.NO_PARTNER)
    others = [each for each in others if each.disaggregation.transfer_backend == own.transfer_backend]
    if not others:
        return Partners(replica_ids=(), lack=UnroutableReason.OTHER_BACKEND)
    others = [each for each in others if each.disaggregation.tensor_parallel == own.tensor_parallel]
    if not others:
        return Partners(replica_ids=(), lack=UnroutableReason.OTHER_TENSOR_PARALLEL)
    partners = tuple(each.replica_id for each in others if each.policy_version == replica.policy_version)
    return Partners(replica_ids=partners, lack=None if partners else UnroutableReason.OTHER_VERSION)
