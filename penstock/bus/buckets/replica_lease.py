"""The value of a rollout engine's lease: its Replica message as JSON, so that people can read it too."""

from collections.abc import Mapping

import structlog
from google.protobuf import json_format

from penstock.v1 import common_pb2

log = structlog.get_logger()


def write_replica(replica: common_pb2.Replica) -> bytes:
    """The value of the lease."""
    return json_format.MessageToJson(replica, indent=None).encode()


def read_replica(replica_id: str, lease: bytes) -> common_pb2.Replica | None:
    """The replica in the lease of key `replica_id`; None, with a line in the log, if the lease is not one."""
    try:
        replica = json_format.Parse(lease, common_pb2.Replica(), ignore_unknown_fields=True)
        if replica.replica_id != replica_id or not replica.address:
            raise ValueError(f"replica_id {replica.replica_id!r} or address {replica.address!r} is wrong")
    except (json_format.ParseError, ValueError) as error:
        log.error("replica.unreadable", replica=replica_id, error=str(error))
        return None
    return replica


class ReplicaLeases:
    """Reads the leases of a pool again and again. A lease is parsed when its value changes, not when it is renewed."""

    def __init__(self) -> None:
        """Nothing was read yet."""
        self._parsed: dict[str, tuple[bytes, common_pb2.Replica | None]] = {}

    def read(self, leases: Mapping[str, bytes]) -> dict[str, common_pb2.Replica]:
        """The replicas by id, without those whose lease is unreadable.

        Do not change them: the same objects are returned until their leases say something new.
        """
        before = self._parsed
        self._parsed = {
            replica_id: known
            if (known := before.get(replica_id)) is not None and known[0] == lease
            else (lease, read_replica(replica_id, lease))
            for replica_id, lease in leases.items()
        }
        return {replica_id: replica for replica_id, (_, replica) in self._parsed.items() if replica is not None}
