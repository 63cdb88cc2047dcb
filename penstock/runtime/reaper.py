"""Kills the process groups that a process has started when it ends, however it ends: its side of the one that kills."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from penstock.runtime import reaper_process
from penstock.runtime.parent_death import dying_with_parent


class Reaper:
    """Knows the OS process groups of this process's children, and kills those left when this one ends. Use `start`."""

    def __init__(self, process: asyncio.subprocess.Process, pipe: socket.socket) -> None:
        self._process = process
        self._pipe = pipe

    @classmethod
    async def start(cls) -> "Reaper":
        """Start it, out of reach of the terminal's signals."""
        command = [sys.executable, "-I", "-S", reaper_process.__file__]
        pipe, its_end = socket.socketpair()
        with its_end:
            process = await asyncio.create_subprocess_exec(*command, stdin=its_end.fileno(), start_new_session=True)
        return cls(process, pipe)

    def forget(self, group: int) -> None:
        """Nothing is left of this group."""
        self._send(f"-{group}\n")

    def naming_child(self) -> Callable[[], None]:
        """A `preexec_fn` that makes the child die with this process, and its group with it.

        The child names its group itself, before it runs a program that could start others: this process may be killed
        before it has learned the child's id.
        """
        die_with_parent = dying_with_parent()

        def name_group() -> None:
            die_with_parent()
            self._send(f"+{os.getpid()}\n")

        return name_group

    async def end(self) -> None:
        """Let it go; it kills the groups that were not taken back."""
        self._pipe.close()
        await self._process.wait()

    def _send(self, line: str) -> None:
        with suppress(ConnectionError):  # lines of several processes do not mix: each is sent whole
            self._pipe.send(line.encode(), socket.MSG_NOSIGNAL)
