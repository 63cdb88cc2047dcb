"""The order of a push: by id, and of prefill and decode replicas some of each are always done and some not."""

from penstock.v1 import common_pb2
from services.trainer.weight_sync.push_order import in_turn

UNIFIED = common_pb2.REPLICA_ROLE_UNIFIED
PREFILL, DECODE = common_pb2.REPLICA_ROLE_PREFILL, common_pb2.REPLICA_ROLE_DECODE


def replica(name: str, role: "common_pb2.ReplicaRole.ValueType" = UNIFIED) -> common_pb2.Replica:
    return common_pb2.Replica(replica_id=name, role=role)


def test_replicas_of_one_role_go_by_id() -> None:
    """Whatever the order of their leases: a process group is kept while it has the same members in the same order."""
    names = ["engine-2", "engine-0", "engine-1"]
    assert [each.replica_id for each in in_turn(map(replica, names))] == sorted(names)
    assert in_turn([]) == []


def test_at_every_moment_each_role_is_as_far_as_the_other() -> None:
    """Two prefill replicas among six decode replicas: the share that is done differs by half a replica at most."""
    pool = [replica(f"decode-{n}", DECODE) for n in range(6)] + [replica(f"prefill-{n}", PREFILL) for n in range(2)]
    order = [each.role for each in in_turn(pool)]
    assert sorted(order) == sorted(each.role for each in pool)
    for done in range(len(order) + 1):
        shares = [order[:done].count(role) / order.count(role) for role in (PREFILL, DECODE)]
        assert abs(shares[0] - shares[1]) <= 0.5
    assert order[0] == order[-1] == DECODE
    assert set(order[2:6]) == {PREFILL, DECODE}
