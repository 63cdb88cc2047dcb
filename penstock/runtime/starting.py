"""Starts programs, and says what a machine lacks that cannot start one more."""

import asyncio
import errno
from typing import Any, Final

from penstock.errors import SetupError

_REMEDIES: Final = {
    errno.EAGAIN: "end other processes, or raise the limit of processes and threads (`ulimit -u`; the pids limit of a "
    "container or job)",
    errno.ENOMEM: "free memory of this machine, or raise the memory limit of the container or job",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "end other processes, or raise the limit of all open files (`sysctl fs.file-max`)",
}


async def start_program(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a program as `asyncio.create_subprocess_exec` does.

    Raises:
        OSError: there is no such program, or no room for another process, or for the thread in which asyncio waits for
            its end.
    """
    try:
        return await asyncio.create_subprocess_exec(*command, **options)
    except RuntimeError as error:  # of that thread
        raise BlockingIOError(errno.EAGAIN, str(error)) from None


def explained(what: str, error: OSError) -> OSError | SetupError:
    """Return the error of `start_program` for a person, with the remedy; the same one if no room was lacking.

    Args:
        what: What could not be started.
        error: Why.
    """
    remedy = _REMEDIES.get(error.errno or 0)
    return error if remedy is None else SetupError(f"{what} could not be started: {error.strerror}; {remedy}")
