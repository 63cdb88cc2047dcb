"""A pool's leases are read often and parsed once."""

from penstock.bus.buckets.replica_lease import ReplicaLeases, write_replica
from penstock.v1 import common_pb2


def _lease(replica_id: str, version: int) -> bytes:
    return write_replica(common_pb2.Replica(replica_id=replica_id, address="host:1", policy_version=version))


def test_a_lease_is_parsed_when_its_value_changes() -> None:
    """A renewal with the same value gives the same object; what left is gone, and comes back as it is then."""
    leases = ReplicaLeases()
    first = leases.read({"a": _lease("a", 1), "b": _lease("b", 1)})
    second = leases.read({"a": _lease("a", 1), "b": _lease("b", 2)})
    assert second["a"] is first["a"]
    assert second["b"].policy_version == 2
    assert leases.read({"a": _lease("a", 1)}).keys() == {"a"}
    assert leases.read({"a": _lease("a", 1), "b": _lease("b", 3)})["b"].policy_version == 3


def test_an_unreadable_lease_is_no_replica() -> None:
    """Nor does it stand for the one that was there before."""
    leases = ReplicaLeases()
    assert leases.read({"a": _lease("a", 1)}).keys() == {"a"}
    assert leases.read({"a": b"{"}) == {}
