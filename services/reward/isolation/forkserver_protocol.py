"""What the server and the forkserver say to each other."""

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
    """What the forkserver is started with: JSON, its one argument."""

    parent_pid: int
    control_fd: int
    """The control socket, inherited."""
    memory_limit_bytes: int
    """Address space of a worker."""
    sandbox: Sandbox = "auto"
    """Confine workers where the kernel lets them; refuse to start where it does not; or do not."""
    verifiers: dict[str, str] = {}
    """Custom verifiers by name, to be loaded before any worker is forked: "file.py:function" or "module:function"."""


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
