"""The replicas that are held out of pushes for an evaluation, as routers read them from NATS.

The trainer writes them and the routers read them, both through this module.
"""

from google.protobuf import json_format

from penstock.errors import CorruptMessageError
from penstock.v1 import trainer_pb2

HELD_OUT_KEY = "held_out"
"""The key, in the bucket of the published version."""


def write_held_out_replicas(held_out: trainer_pb2.HeldOutReplicas) -> bytes:
    """Return the value to store, as readable JSON."""
    return json_format.MessageToJson(held_out, indent=None, preserving_proto_field_name=True).encode()


def read_held_out_replicas(value: bytes) -> trainer_pb2.HeldOutReplicas:
    """Return the message that `write_held_out_replicas` turned into `value`; unknown fields are ignored.

    Raises:
        CorruptMessageError: the value does not name held-out replicas.
    """
    try:
        held_out = json_format.Parse(value, trainer_pb2.HeldOutReplicas(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise CorruptMessageError(f"{value[:200]!r} does not name held-out replicas: {error}") from None
    if held_out.policy_version < 0 or (held_out.replica_ids and not held_out.policy_version):
        raise CorruptMessageError(
            f"{value[:200]!r} does not name held-out replicas: want policy_version >= 1, or 0 and no replica_ids"
        )
    return held_out
