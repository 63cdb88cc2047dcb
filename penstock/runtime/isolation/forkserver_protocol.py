"""Messages between a server and its forkserver."""

import struct
from typing import Literal

import msgspec

COMMAND = struct.Struct("<cI")
"""SPAWN or REAP, and the process id to reap."""
SPAWN = b"S"
"""Fork a worker; its socket comes with the message."""
REAP = b"R"
"""Wait for a worker that was killed."""
MAX_REPLY_BYTES = 8192

AT_THE_LIMIT = "raise the limit of processes and threads: `ulimit -u`, or pids of the container"
"""The remedy where the system has none left for this user."""

Sandbox = Literal["auto", "require", "off"]


class ForkserverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a forkserver: JSON, its first argument."""

    parent_pid: int
    control_fd: int
    """The control socket, inherited."""
    sandbox: Sandbox = "auto"
    """auto: confine workers if the kernel allows it. require: refuse to start if it does not. off: do not confine."""


class ForkserverReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sent once when the forkserver is ready or has failed, then for each SPAWN."""

    pid: int = 0
    """Process id of the new worker."""
    error: str = ""
    """Why the forkserver cannot start, or cannot fork a worker."""
    warning: str = ""
    """A warning for people, although it started."""


def encode_reply(reply: ForkserverReply) -> bytes:
    """Return the reply as one message."""
    return msgspec.msgpack.encode(reply)
