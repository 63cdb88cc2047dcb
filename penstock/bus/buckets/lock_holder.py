"""The value of a lock: its LockHolder message as JSON, so that people can read it too; empty where nobody holds it."""

import os
import socket
import uuid

from google.protobuf import json_format

from penstock.v1 import common_pb2

RELEASED = b""
"""The value of a lock that nobody holds."""


def this_process() -> common_pb2.LockHolder:
    """Return this process as the holder of a lock that it claims now."""
    return common_pb2.LockHolder(host=socket.gethostname(), pid=os.getpid(), claim_id=uuid.uuid4().hex)


def write_lock_holder(holder: common_pb2.LockHolder) -> bytes:
    """Return the value of the lock that `holder` holds."""
    return json_format.MessageToJson(holder, indent=None, preserving_proto_field_name=True).encode()


def read_lock_holder(value: bytes) -> common_pb2.LockHolder | None:
    """Return the holder; None if nobody holds the lock, or the value names nobody."""
    try:
        return json_format.Parse(value, common_pb2.LockHolder(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError):
        return None
