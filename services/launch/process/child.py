"""One process of a run over all its restarts: its state, its log and its error, wherever it runs."""

import asyncio
import json
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from penstock.errors import SetupError
from penstock.runtime.process import EXIT_FAILURE
from penstock.runtime.starting import explained
from services.launch.process.backend import Backend, Ending, RunningProcess
from services.launch.process.bounded_log import BoundedLog
from services.launch.process.process_trace import ProcessTrace
from services.launch.process.spec import ProcessSpec


class State(StrEnum):
    """The state of a process as the launcher sees it."""

    STARTING = "starting"
    UP = "up"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class Child:
    """A process of the run over all its restarts."""

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        log: BoundedLog,
        backend: Backend,
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
        self.has_been_up = False
        """Whether one of its starts became ready."""
        self.was_killed = False
        """Whether the launcher killed the process since its last start."""
        self.ending: Ending | None = None
        """How it ended last; None: it has not ended yet."""
        self._clock = clock
        self._started_at = clock()
        self._backend = backend
        self._process: RunningProcess | None = None

    @property
    def is_running(self) -> bool:
        """Whether the process has been started and has not ended."""
        return self._process is not None

    @property
    def age_s(self) -> float:
        """Seconds since the last start."""
        return self._clock() - self._started_at

    async def run(self) -> Ending:
        """Start the process and wait for its end; nothing that it started remains.

        A restart for which the machine has no memory, disk or open file at that moment is an ending too.

        Raises:
            SetupError: this machine has no room for the first start.
            OSError: the first start failed for another reason.
        """
        try:
            if self.spec.error_file is not None:
                self.spec.error_file.unlink(missing_ok=True)
            self.log.mark_start()
            process = await self._backend.start(self.spec, self.log, self.stop_requested)
        except OSError as error:
            if not self.num_starts:
                raise explained(self.spec.name, error) from None
            self._started_at = self._clock()  # what ran before has no part in it
            self.ending = Ending(code=EXIT_FAILURE, not_started=error.strerror or str(error))
            return self.ending
        if process is None:  # asked to stop before there was room for it
            return Ending(code=0)
        self._process = process
        self.was_killed = False
        self.address = process.address
        self.state = State.STARTING
        self.num_starts += 1
        self._started_at = self._clock()
        if self.stop_requested.is_set():  # asked to stop while it was being started
            self.terminate()
        self.ending = await process.wait()
        self._record("process", exit_code=self.ending.code, was_stopped=self.stop_requested.is_set())
        self._process = None
        return self.ending

    async def forget(self) -> None:
        """Give back what is kept for the process: it will not be started again."""
        await self._backend.forget(self.spec)

    def terminate(self) -> None:
        """Ask the process to end; it ends its own children."""
        self.stop_requested.set()
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill the process and everything that it started."""
        if self._process is not None:
            self.was_killed = True
            self._process.kill()

    async def check_ready(self) -> bool:
        """Ask the process whether it is ready; return true the first time that it is."""
        process, check = self._process, self.spec.is_ready
        if process is None or self.state is not State.STARTING:
            return False
        is_ready = check is None or await check(self.address)
        if not is_ready or self._process is not process:  # the answer is void if the process has died since
            return False
        self.state = State.UP
        self.has_been_up = True
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
