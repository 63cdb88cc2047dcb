"""One process of a run: started in a session of its own, with its log in a file, and ended with all its descendants."""

import asyncio
import dataclasses
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum, StrEnum
from pathlib import Path

from penstock.errors import SetupError
from penstock.runtime.ports import held_ports
from penstock.runtime.reaper import Reaper
from services.launch.bounded_log import BoundedLog


class StopPhase(IntEnum):
    """When a process is stopped; processes of a later phase serve those of an earlier one."""

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
    phase: StopPhase
    ends_run: bool = False
    """Its exit with 0 is the end of the run; for every other process an exit is a death. At the end it is given all the
    time that it needs."""
    address: str = ""
    """host:port on which it serves. Port 0: each start is given a free one, by `port_key`."""
    port_key: str = ""
    """The setting that takes the port, for example rollout.port."""
    is_ready: Callable[[str], Awaitable[bool]] | None = None
    """Whether the process at an address has come up; None: once it runs."""
    error_file: Path | None = None
    """Where it writes the error that ends it, as {"error", "message"}."""


class Child:
    """A process of the run over all its restarts."""

    def __init__(
        self, spec: ProcessSpec, *, log: BoundedLog, reaper: Reaper, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.spec = spec
        self.log = log
        self.state = State.STARTING
        self.num_starts = 0
        self.address = spec.address
        self.stop_asked = asyncio.Event()
        """Set when the process has been asked to end."""
        self._clock = clock
        self._started_at = clock()
        self._reaper = reaper
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id, while one runs."""
        return None if self._process is None else self._process.pid

    @property
    def age_s(self) -> float:
        """Seconds since the last start."""
        return self._clock() - self._started_at

    async def run(self) -> int:
        """Start the process and wait for its end; nothing of its OS process group is left then.

        Returns the exit code.
        """
        with self._addressed_command() as command:
            return await self._run(command)

    async def _run(self, command: Sequence[str]) -> int:
        if self.spec.error_file is not None:
            self.spec.error_file.unlink(missing_ok=True)
        self.log.mark_start()
        with self.log.path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
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
        self._started_at = self._clock()
        if self.stop_asked.is_set():  # while it was being started
            self.terminate()
        code = await process.wait()
        self.kill()
        self._reaper.forget(process.pid)
        self._process = None
        return code

    def terminate(self) -> None:
        """Ask the process to end; it sees to its own children."""
        self.stop_asked.set()
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Kill the process and all that it started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def check_ready(self) -> bool:
        """Ask the process whether it has come up; true when it has just been seen to."""
        process, check = self._process, self.spec.is_ready
        if process is None or self.state is not State.STARTING:
            return False
        is_ready = check is None or await check(self.address)
        if not is_ready or self._process is not process:  # an answer of a process that has died since is void
            return False
        self.state = State.UP
        return True

    def read_error(self) -> str | None:
        """The error that the process wrote as it ended; None if it wrote none."""
        return self._read_error("message")

    def lacks_what_it_had(self, state: State) -> bool:
        """Whether the process, started again and ending in `state`, missed something that was there at its first start.

        As when nats-server is frozen at that moment: the settings are right, and waiting helps.
        """
        return self.num_starts > 1 and state is not State.UP and self._read_error("error") == SetupError.__name__

    def _read_error(self, key: str) -> str | None:
        if self.spec.error_file is None:
            return None
        try:
            return str(json.loads(self.spec.error_file.read_text())[key])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @contextmanager
    def _addressed_command(self) -> Iterator[Sequence[str]]:
        """The command, with a port if the launcher chooses it; the port is held during the context.

        Each start gets a new port: callers of the old process cannot reach the new one by mistake.
        """
        host, _, port = self.spec.address.rpartition(":")
        if not self.spec.port_key or port != "0":
            yield self.spec.command
            return
        with held_ports(1) as (held,):
            self.address = f"{host}:{held}"
            yield [*self.spec.command, f"--{self.spec.port_key}={held}"]
