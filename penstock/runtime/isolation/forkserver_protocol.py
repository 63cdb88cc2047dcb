"""What a server and its forkserver say to each other."""

import struct
from typing import Literal

import msgspec

COMMAND = struct.Struct("<cI")
"""SPAWN or REAP, and the process id to reap."""
SPAWN = b"S"
"""Fork a worker; its socket comes along."""
REAP = b"R"
"""Wait for a worker that was killed."""
MAX_REPLY_BYTES = 8192

Sandbox = Literal["auto", "require", "off"]


class ForkserverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every forkserver is started with: JSON, its first argument."""

    parent_pid: int
    control_fd: int
    """The control socket, inherited."""
    sandbox: Sandbox = "auto"
    """Confine workers where the kernel lets them; refuse to start where it does not; or do not."""


class ForkserverReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Once, that it is ready or why not; then to each SPAWN."""

    pid: int = 0
    """The new worker's."""
    error: str = ""
    """Why it cannot start."""
    warning: str = ""
    """What people should know although it started."""


def encode_reply(reply: ForkserverReply) -> bytes:
    """The reply as one message."""
    return msgspec.msgpack.encode(reply)
