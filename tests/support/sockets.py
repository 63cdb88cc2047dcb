"""The TCP connections of this process, as the kernel has them."""

import contextlib
import os
import socket
from pathlib import Path


def options_of_accepted(port: int, option: int) -> list[int]:
    """The TCP-level `option` of each connection that a server of this process accepted on `port`."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not os.readlink(entry).startswith("socket:"):
                continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as connection:
            connection.getpeername()
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == port:
                found.append(connection.getsockopt(socket.IPPROTO_TCP, option))
    return found
