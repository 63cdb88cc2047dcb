"""One process of a run: started in a session of its own, with its log in a file, and ended with all its descendants."""

import asyncio
import dataclasses
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum, StrEnum
from pathlib import Path

from penstock.runtime.parent_death import dying_with_parent
from services.launch import reaper

_UP = re.compile(r"\b\w+\.(started|ready)\b|Server is ready")
"""What a service says when it has come up, for example server.started; and what nats-server says."""


class StopStage(IntEnum):
    """When a process is stopped; those of a later stage serve those of an earlier one."""

    WORK = 0
    SERVE = 1
    BUS = 2


class State(StrEnum):
    """What a process is doing, as far as the launcher sees."""

    STARTING = "starting"
    UP = "up"
    RESTARTING = "restarting"
    STOPPED = "stopped"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to start and how it belongs to the run."""

    name: str
    """Unique in the run; also names the log."""
    command: Sequence[str]
    environment: Mapping[str, str]
    """The whole environment, not additions to it."""
    stage: StopStage
    ends_run: bool = False
    """Its exit with 0 is the end of the run; for every other process an exit is a death."""


class Reaper:
    """The process that kills what is left, should this one be killed."""

    def __init__(self, process: asyncio.subprocess.Process, line: socket.socket) -> None:
        """Use `start`."""
        self._process = process
        self._line = line

    @classmethod
    async def start(cls) -> "Reaper":
        """Start it, out of reach of the terminal's signals."""
        command = [sys.executable, "-I", "-S", reaper.__file__]
        line, its_end = socket.socketpair()
        with its_end:
            process = await asyncio.create_subprocess_exec(*command, stdin=its_end.fileno(), start_new_session=True)
        return cls(process, line)

    def tell(self, sign: str, group: int) -> None:
        """Name a group (`+`) or take it back (`-`). Any process of the run may: a line is sent whole."""
        with suppress(ConnectionError):
            self._line.send(f"{sign}{group}\n".encode(), socket.MSG_NOSIGNAL)

    def naming_child(self) -> Callable[[], None]:
        """A `preexec_fn` after which the child dies with this process, and all of its group with it.

        The child names its group itself, before it is a program that could start others: this process may be killed
        before it has learned the child's id.
        """
        die_with_parent = dying_with_parent()

        def name_group() -> None:
            die_with_parent()
            self.tell("+", os.getpid())

        return name_group

    async def end(self) -> None:
        """Let it go; it kills what was not taken back."""
        self._line.close()
        await self._process.wait()


class Child:
    """A process of the run over all its restarts."""

    def __init__(self, spec: ProcessSpec, *, log_file: Path, reaper: Reaper) -> None:
        """Nothing is started yet."""
        self.spec = spec
        self.log_file = log_file
        self.state = State.STARTING
        self.num_starts = 0
        self._started_at = time.monotonic()
        self._reaper = reaper
        self._process: asyncio.subprocess.Process | None = None
        self._log_offset = 0
        self._asked_to_stop = False

    @property
    def pid(self) -> int | None:
        """Process id, while one runs."""
        return None if self._process is None else self._process.pid

    @property
    def age_s(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self._started_at

    async def run(self) -> int:
        """Start the process and wait for its end; nothing of its group is left then. Returns the exit code."""
        with self.log_file.open("ab") as log:
            self._log_offset = log.tell()
            process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                env=dict(self.spec.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=self._reaper.naming_child(),
            )
        self._process = process
        self.state = State.STARTING
        self.num_starts += 1
        self._started_at = time.monotonic()
        if self._asked_to_stop:  # while it was being started
            self.terminate()
        code = await process.wait()
        self.kill()
        self._reaper.tell("-", process.pid)
        self._process = None
        return code

    def terminate(self) -> None:
        """Ask the process to end; it sees to its own children."""
        self._asked_to_stop = True
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Kill the process and all that it started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def look(self) -> bool:
        """Read in the log whether the process has come up; true when it has just been seen to."""
        if self._process is None or self.state is not State.STARTING or not _UP.search(self.log_since_start()):
            return False
        self.state = State.UP
        return True

    def log_since_start(self) -> str:
        """What the process has logged since it was last started."""
        with suppress(FileNotFoundError), self.log_file.open("rb") as log:
            log.seek(self._log_offset)
            return log.read().decode(errors="replace")
        return ""
