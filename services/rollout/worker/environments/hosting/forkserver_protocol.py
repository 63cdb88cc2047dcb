"""What the worker and the server that forks environments say to each other: msgpack, one record a packet."""

from typing import Any, TypeAlias

import msgspec

MAX_PACKET_BYTES = 64 * 2**10


class ForkserverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the server is started with: JSON, its one argument."""

    parent_pid: int
    control_fd: int
    """The control socket, inherited."""
    path: str
    """The environment's class: "package.module:Class"."""
    args: dict[str, Any]
    sys_path: list[str]
    """Where the worker finds modules."""


class Spawn(msgspec.Struct, frozen=True, kw_only=True, tag="spawn"):
    """Fork a process for an episode; its socket comes along."""


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag="kill"):
    """Kill a process and all that it started."""

    pid: int


Command: TypeAlias = Spawn | Kill


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Once, at the start."""

    error: str = ""
    """Why no process can be forked: the class cannot be loaded, or does not take the arguments."""


class Spawned(msgspec.Struct, frozen=True, kw_only=True, tag="spawned"):
    """To each Spawn, in their order."""

    pid: int
    error: str = ""
    """Why there is none."""


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag="exited"):
    """A process has ended, and its group with it."""

    pid: int
    status: int
    """Its exit code; below 0: minus the signal that ended it."""
    output: str
    """The last of what it wrote to standard output and standard error."""


Event: TypeAlias = Ready | Spawned | Exited
