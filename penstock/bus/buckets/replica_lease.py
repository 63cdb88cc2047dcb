"""The value of a rollout engine's lease: its Replica message as readable JSON."""

from collections.abc import Mapping

import structlog
from google.protobuf import json_format

from penstock.v1 import common_pb2

log = structlog.get_logger()


def write_replica(replica: common_pb2.Replica) -> bytes:
    """Return the value of the lease."""
    return json_format.MessageToJson(replica, indent=None).encode()


def read_replica(replica_id: str, lease: bytes) -> common_pb2.Replica | None:
    """Return the replica in the lease of key `replica_id`; if the lease is unreadable, log it and return None."""
    try:
        replica = json_format.Parse(lease, common_pb2.Replica(), ignore_unknown_fields=True)
        if replica.replica_id != replica_id or not replica.address:
            raise ValueError(f"replica_id {replica.replica_id!r} or address {replica.address!r} is wrong")
    except (json_format.ParseError, ValueError) as error:
        log.error("replica.unreadable", replica_id=replica_id, error=str(error))
        return None
    return replica


class ReplicaLeases:
    """Parses the leases of a pool. A lease is parsed when its value changes, not at each renewal."""

    def __init__(self) -> None:
        """Start with an empty cache."""
        self._parsed: dict[str, tuple[bytes, common_pb2.Replica | None]] = {}

    def read(self, leases: Mapping[str, bytes]) -> dict[str, common_pb2.Replica]:
        """Return the replicas by id, without those whose lease is unreadable.

        Do not modify them: the same objects are returned until their leases change.
        """
        before = self._parsed
        self._parsed = {
            replica_id: known
            if (known := before.get(replica_id)) is not None and known[0] == lease
            else (lease, read_replica(replica_id, lease))
            for replica_id, lease in leases.items()
        }
        return {replica_id: replica for replica_id, (_, replica) in self._parsed.items() if replica is not None}
