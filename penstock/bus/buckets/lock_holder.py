"""The value of a lock: its LockHolder message as readable JSON; empty if the lock is free."""

import os
import socket
import uuid

from google.protobuf import json_format

from penstock.v1 import common_pb2

RELEASED = b""
"""The value of a free lock."""


def this_process() -> common_pb2.LockHolder:
    """Return the LockHolder message for this process, claiming now."""
    return common_pb2.LockHolder(host=socket.gethostname(), pid=os.getpid(), claim_id=uuid.uuid4().hex)


def write_lock_holder(holder: common_pb2.LockHolder) -> bytes:
    """Return the value of the lock that `holder` holds."""
    return json_format.MessageToJson(holder, indent=None, preserving_proto_field_name=True).encode()


def read_lock_holder(value: bytes) -> common_pb2.LockHolder | None:
    """Return the holder; None if the lock is free or the value does not name a holder."""
    try:
        return json_format.Parse(value, common_pb2.LockHolder(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError):
        return None
