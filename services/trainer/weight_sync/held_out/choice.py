"""Chooses the replicas that an evaluation holds out of pushes. Pure.

Invariants: at least one replica that can answer is held out, or one prefill and one decode replica if there are only
pairs. Training keeps at least one of each kind that is held out, or whole pairs, unless there is only one: that one is
held out, and `can_spare` reports that training has none. Replicas that are held out stay so while they live.
"""

from collections.abc import Collection, Iterable

from penstock.v1 import common_pb2

_UNIFIED = common_pb2.REPLICA_ROLE_UNIFIED
_PREFILL = common_pb2.REPLICA_ROLE_PREFILL
_DECODE = common_pb2.REPLICA_ROLE_DECODE


def choose_held_out(
    replicas: Iterable[common_pb2.Replica], held_out: Collection[str], *, num: int, version: int
) -> list[common_pb2.Replica]:
    """Return the replicas to hold out, sorted by id; empty without replicas that can answer.

    Replicas that are already held out are preferred, then those that hold the version, then those that hold an older
    one or none, because they need a push anyway.

    Args:
        replicas: Replicas that can take a push.
        held_out: Ids of the replicas that are already held out.
        num: Replicas to hold out, at least 1; of PD pairs, n prefill and n decode replicas. Unified replicas go first,
            and may all be held out if training has a pair.
        version: The version of the evaluation.
    """

    def rank(replica: common_pb2.Replica) -> tuple[bool, bool, bool, str]:
        held = replica.policy_version
        return replica.replica_id not in held_out, held != version, held > version, replica.replica_id

    ranked = sorted(replicas, key=rank)
    unified = [each for each in ranked if each.role == _UNIFIED]
    prefill = [each for each in ranked if each.role == _PREFILL]
    decode = [each for each in ranked if each.role == _DECODE]
    if unified:
        has_pairs = bool(prefill and decode)
        chosen = unified[: num if has_pairs else _num_of(num, unified)]
    elif prefill and decode:
        chosen = prefill[: _num_of(num, prefill)]
        peers = {_pairing(each) for each in chosen}
        decode.sort(key=lambda each: _pairing(each) not in peers)  # stable: ties keep their rank
        chosen += decode[: _num_of(num, decode)]
    else:
        chosen = []
    return sorted(chosen, key=lambda each: each.replica_id)


def can_spare(replicas: Iterable[common_pb2.Replica], chosen: Collection[common_pb2.Replica]) -> bool:
    """Return whether any are chosen, and training has replicas left: a unified one, or a prefill and a decode one."""
    ids = {each.replica_id for each in chosen}
    left = {each.role for each in replicas if each.replica_id not in ids}
    return bool(ids) and (_UNIFIED in left or {_PREFILL, _DECODE} <= left)


def num_slots(chosen: Iterable[common_pb2.Replica]) -> int:
    """Return the number of samples that replicas generate at once; a prefill replica generates none."""
    return sum(max(1, each.max_running) for each in chosen if each.role != _PREFILL)


def _num_of(num: int, replicas: Collection[common_pb2.Replica]) -> int:
    return max(1, min(num, len(replicas) - 1))


def _pairing(replica: common_pb2.Replica) -> tuple[str, int]:
    return replica.disaggregation.transfer_backend, replica.disaggregation.tensor_parallel
