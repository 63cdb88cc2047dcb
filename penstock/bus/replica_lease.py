"""The value of a rollout engine's lease: its Replica message as JSON, so that people can read it too."""

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
