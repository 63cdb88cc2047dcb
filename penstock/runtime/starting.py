"""Starts programs, and says what a machine lacks that cannot start one more."""

import asyncio
import errno
from typing import Any, Final

from penstock.errors import SetupError

_TOO_MANY: Final = (
    "end other processes, or raise the limit of processes and threads (`ulimit -u`; the pids limit of a container or "
    "job)"
)
_REMEDIES: Final = {
    errno.EAGAIN: _TOO_MANY,
    errno.ENOMEM: "free memory of this machine, or raise the memory limit of the container or job",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "end other processes, or raise the limit of all open files (`sysctl fs.file-max`)",
}


async def start_program(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a program as `asyncio.create_subprocess_exec` does.

    Raises:
        OSError: there is no such program, or no room for another process.
        SetupError: there is no room for the thread in which asyncio waits for the program's end. The program may run,
            and nobody has its handle: it must not be started again.
    """
    try:
        return await asyncio.create_subprocess_exec(*command, **options)
    except RuntimeError as error:
        raise SetupError(f"{command[0]} cannot be waited for: {error}; {_TOO_MANY}") from None


def explained(what: str, error: OSError) -> OSError | SetupError:
    """Return the error of `start_program` for a person, with the remedy; the same one if no room was lacking.

    Args:
        what: What could not be started.
        error: Why.
    """
    remedy = _REMEDIES.get(error.errno or 0)
    return error if remedy is None else SetupError(f"{what} could not be started: {error.strerror}; {remedy}")
