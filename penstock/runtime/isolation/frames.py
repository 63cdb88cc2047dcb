"""Records over a stream socket: msgpack, each length-prefixed."""

import os
import struct

import msgspec

HEADER = struct.Struct("<I")
"""Length of the record that follows, in bytes."""


def frame(record: msgspec.Struct) -> bytes:
    """Return the record as length-prefixed bytes."""
    data = msgspec.msgpack.encode(record)
    return HEADER.pack(len(data)) + data


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data` with `write`, because the sandbox forbids `send`."""
    while data:
        data = data[os.write(fd, data) :]
