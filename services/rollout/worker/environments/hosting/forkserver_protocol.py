"""Messages between the worker and the server that forks environments: msgpack, one record per packet."""

from typing import Any, TypeAlias

import msgspec

MAX_PACKET_BYTES = 64 * 2**10


class ForkserverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The server's only argument, as JSON."""

    parent_pid: int
    control_fd: int
    """The control socket, inherited."""
    path: str
    """The environment's class: "package.module:Class"."""
    args: dict[str, Any]
    sys_path: list[str]
    """The worker's module search path."""


class Spawn(msgspec.Struct, frozen=True, kw_only=True, tag="spawn"):
    """Fork a process for an episode; its socket is attached."""


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag="kill"):
    """Kill a process and its process group."""

    pid: int


Command: TypeAlias = Spawn | Kill


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Sent once, at the start."""

    error: str = ""
    """Why no process can be forked: the class cannot be loaded, or does not take the arguments."""


class Spawned(msgspec.Struct, frozen=True, kw_only=True, tag="spawned"):
    """Answers each Spawn, in order."""

    pid: int
    error: str = ""
    """Why there is no process; empty if there is one."""


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag="exited"):
    """A process has ended, and its group with it."""

    pid: int
    status: int
    """Exit code; if negative, minus the signal that ended it."""
    output: str
    """The last part of its standard output and standard error."""


Event: TypeAlias = Ready | Spawned | Exited
