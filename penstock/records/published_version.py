"""The policy version that the trainer last published, as every process reads it from NATS.

The trainer writes it and the routers read it, both through this module.
"""

from google.protobuf import json_format

from penstock.errors import CorruptMessageError
from penstock.v1 import trainer_pb2

POLICY_BUCKET = "policy"
"""The run's bucket that holds the version."""
CURRENT_KEY = "current"
"""The version's key in that bucket."""


def write_published_version(published: trainer_pb2.PublishedVersion) -> bytes:
    """Return the value to store, as readable JSON."""
    return json_format.MessageToJson(published, indent=None, preserving_proto_field_name=True).encode()


def read_published_version(value: bytes) -> trainer_pb2.PublishedVersion:
    """Return the message that `write_published_version` turned into `value`; unknown fields are ignored.

    Raises:
        CorruptMessageError: the value is not a published version.
    """
    try:
        published = json_format.Parse(value, trainer_pb2.PublishedVersion(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise CorruptMessageError(f"{value[:200]!r} is not a published version: {error}") from None
    if not 0 <= published.min_policy_version <= published.policy_version or published.policy_version < 1:
        raise CorruptMessageError(
            f"{value[:200]!r} is not a published version: want policy_version >= 1 and min_policy_version in 0 .. "
            "policy_version"
        )
    return published
