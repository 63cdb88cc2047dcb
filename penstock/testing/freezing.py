"""Freezes a process: its connections stay open, and nothing is answered."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def freeze(pid: int) -> None:
    """SIGSTOP, and wait until each thread has stopped: some go on for milliseconds after the signal."""
    os.kill(pid, signal.SIGSTOP)
    while any(_state(thread) != "T" for thread in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)


def thaw(pid: int) -> None:
    """SIGCONT."""
    os.kill(pid, signal.SIGCONT)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """The process is frozen during the context."""
    freeze(pid)
    try:
        yield
    finally:
        thaw(pid)


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]
