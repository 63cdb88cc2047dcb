"""Starts and informs a process that kills the OS process groups that this one leaves behind, however this one ends."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress

from penstock.runtime.children import reaper_process
from penstock.runtime.children.parent_death import dying_with_parent
from penstock.runtime.starting import start_program


class Reaper:
    """Tracks the OS process groups of this process's children, and kills those left when this one ends. Use `start`."""

    def __init__(self, process: asyncio.subprocess.Process, pipe: socket.socket) -> None:
        self._process = process
        self._pipe = pipe

    @classmethod
    async def start(cls) -> "Reaper":
        """Start the reaper process, out of reach of the terminal's signals.

        Raises:
            OSError: this machine has no room for another process.
        """
        command = [sys.executable, "-I", "-S", reaper_process.__file__]
        pipe, its_end = socket.socketpair()
        with ExitStack() as open_ends:
            open_ends.enter_context(pipe)
            with its_end:
                process = await start_program(*command, stdin=its_end.fileno(), start_new_session=True)
            open_ends.pop_all()
        return cls(process, pipe)

    def forget(self, process_group: int) -> None:
        """Report that nothing is left of this process group."""
        self._send(f"-{process_group}\n")

    def naming_child(self) -> Callable[[], None]:
        """Return a `preexec_fn` that makes the child, and its process group, die with this process.

        The child reports the group itself, before it runs a program that could start others: this process may be killed
        before it learns the child's id.
        """
        die_with_parent = dying_with_parent()

        def name_process_group() -> None:
            die_with_parent()
            self._send(f"+{os.getpid()}\n")

        return name_process_group

    async def end(self) -> None:
        """End the reaper; it kills the process groups that were not forgotten."""
        self._pipe.close()
        await self._process.wait()

    def _send(self, line: str) -> None:
        with suppress(ConnectionError):  # each line is sent whole, so lines of several processes do not mix
            self._pipe.send(line.encode(), socket.MSG_NOSIGNAL)
