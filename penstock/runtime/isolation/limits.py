"""The kernel's limits on the resources of a process."""

import os
import resource
from pathlib import Path

_MAX_OPEN_FILES = 64


def limit_process(*, memory_bytes: int) -> None:
    """Bound this process's address space and open files, and forbid core dumps and growing files, permanently.

    What it prints goes nowhere from then on: its standard error is somebody's log, and may be a file.
    """
    lower(resource.RLIMIT_AS, memory_bytes)
    lower(resource.RLIMIT_CORE, 0)
    null_fd = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(null_fd, fd)
    os.close(null_fd)
    lower(resource.RLIMIT_FSIZE, 0)
    lower(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)


def address_space_bytes() -> int:
    """Return the size of this process's address space, which is what `limit_process` bounds."""
    return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()


def lower(which: int, value: int) -> None:
    """Lower a limit permanently; a limit that is lower already stays."""
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))
