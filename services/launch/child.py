"""One process of a run: started in its own session, logging to a file, and ended with all its descendants."""

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
from typing import Any

from penstock.errors import SetupError
from penstock.runtime.ports import held_ports
from penstock.runtime.reaper import Reaper
from services.launch.bounded_log import BoundedLog
from services.launch.process_trace import ProcessTrace


class StopPhase(IntEnum):
    """When a process is stopped; processes of a later phase serve those of an earlier one."""

    WORK = 0
    SERVE = 1
    BUS = 2


class State(StrEnum):
    """The state of a process as the launcher sees it."""

    STARTING = "starting"
    UP = "up"
    RESTARTING = "restarting"
    STOPPED = "stopped"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """How to start a process, and its role in the run."""

    name: str
    """Unique in the run; also the name of the log."""
    command: Sequence[str]
    environment: Mapping[str, str]
    """The whole environment, not additions to it."""
    phase: StopPhase
    ends_run: bool = False
    """Whether its exit with 0 ends the run; any exit of another process counts as a death. At the end it gets all the
    time that it needs."""
    address: str = ""
    """host:port on which it serves. Port 0: each start gets a free port through `port_key`."""
    port_key: str = ""
    """The setting that holds the port, for example rollout.port."""
    is_ready: Callable[[str], Awaitable[bool]] | None = None
    """Checks whether the process at an address is ready; None: it is ready once it runs."""
    error_file: Path | None = None
    """File to which the process writes the error that ends it, as {"error", "message"}."""


class Child:
    """A process of the run over all its restarts."""

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        log: BoundedLog,
        reaper: Reaper,
        clock: Callable[[], float] = time.monotonic,
        trace: ProcessTrace | None = None,
    ) -> None:
        self.spec = spec
        self._trace = trace
        self.log = log
        self.state = State.STARTING
        self.num_starts = 0
        self.address = spec.address
        self.stop_requested = asyncio.Event()
        """Set when the process has been asked to end."""
        self._clock = clock
        self._started_at = clock()
        self._reaper = reaper
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id, while the process runs."""
        return None if self._process is None else self._process.pid

    @property
    def age_s(self) -> float:
        """Seconds since the last start."""
        return self._clock() - self._started_at

    async def run(self) -> int:
        """Start the process and wait for its end; nothing of its OS process group remains.

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
        if self.stop_requested.is_set():  # asked to stop while it was being started
            self.terminate()
        code = await process.wait()
        self._record("process", exit_code=code, was_stopped=self.stop_requested.is_set())
        self.kill()
        self._reaper.forget(process.pid)
        self._process = None
        return code

    def terminate(self) -> None:
        """Ask the process to end; it ends its own children."""
        self.stop_requested.set()
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Kill the process and everything that it started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def check_ready(self) -> bool:
        """Ask the process whether it is ready; return true the first time that it is."""
        process, check = self._process, self.spec.is_ready
        if process is None or self.state is not State.STARTING:
            return False
        is_ready = check is None or await check(self.address)
        if not is_ready or self._process is not process:  # the answer is void if the process has died since
            return False
        self.state = State.UP
        self._record("process.starting")
        return True

    def _record(self, name: str, **attributes: Any) -> None:
        """Record what the process has done since its last start."""
        if self._trace is not None:
            now = time.monotonic()
            about = {"service": self.spec.name, "start": self.num_starts, **attributes}
            self._trace.add(name, now - self.age_s, now, **about)

    def read_error(self) -> str | None:
        """Return the error that the process wrote as it ended; None if it wrote none."""
        return self._read_error("message")

    def lacks_what_it_had(self, state: State) -> bool:
        """Return whether a restarted process that ended in `state` missed something that its first start had.

        One example is a nats-server frozen at that moment: the settings are right, and waiting helps.
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
        """Yield the command, with a port if the launcher chooses it; the port is held during the context.

        Each start gets a new port: callers of the old process cannot reach the new one by mistake.
        """
        host, _, port = self.spec.address.rpartition(":")
        if not self.spec.port_key or port != "0":
            yield self.spec.command
            return
        with held_ports(1) as (held,):
            self.address = f"{host}:{held}"
            yield [*self.spec.command, f"--{self.spec.port_key}={held}"]
