"""Records over a stream socket: msgpack, each length-prefixed."""

import os
import struct

import msgspec

HEADER = struct.Struct("<I")
"""Length of the record that follows, in bytes."""


def frame(record: msgspec.Struct) -> bytes:
    """The record as it goes over the socket."""
    data = msgspec.msgpack.encode(record)
    return HEADER.pack(len(data)) + data


def write_all(fd: int, data: bytes) -> None:
    """All of `data`, by `write`: the sandbox knows no `send`."""
    while data:
        data = data[os.write(fd, data) :]
