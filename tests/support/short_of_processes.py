"""A forkserver on a machine that has no process left for its third worker; each worker does what it is told.

python -m tests.support.short_of_processes SETTINGS WORKERS
"""

import errno
import os
import subprocess
import sys

from penstock.runtime.isolation.forkserver import serve

_NO_ROOM_AT = 3
_fork, _num_forks = os.fork, 0


def fork() -> int:
    """Fail once, as the kernel does at a container's limit."""
    global _num_forks
    _num_forks += 1
    if _num_forks == _NO_ROOM_AT:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return _fork()


def answer(worker_fd: int, is_confined: bool) -> None:
    """Send back what comes; "fail" is a failure, and "start" is answered with a program's process id."""
    while data := os.read(worker_fd, 100):
        if data == b"fail":
            raise ValueError("asked to fail")
        if data == b"start":
            data = str(subprocess.Popen(["sleep", "infinity"]).pid).encode()
        os.write(worker_fd, data)


if __name__ == "__main__":
    os.fork = fork
    serve(sys.argv[1], prepare=lambda: None, work=answer)
