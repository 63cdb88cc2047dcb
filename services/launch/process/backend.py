"""The seam between the supervisor, which is the same everywhere, and the place where processes run.

A backend starts one process, and the process that it returns can be watched and ended. Restarts, order, readiness,
logs, display and the end of the run are the supervisor's and the launcher's.
"""

import asyncio
import dataclasses
from typing import Protocol

from services.launch.process.bounded_log import BoundedLog
from services.launch.process.spec import ProcessSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process ended."""

    code: int
    """Exit code; negative: the signal that killed it."""
    lost: str = ""
    """Why nobody saw its end, for example that its host died; empty if somebody did."""
    not_started: str = ""
    """Why it was never there; empty if it was."""

    def describe(self) -> str:
        """Return the ending as the predicate of a sentence."""
        if self.not_started:
            return f"could not be started: {self.not_started}"
        if self.lost:
            return f"was lost: {self.lost}"
        return f"was killed by signal {-self.code}" if self.code < 0 else f"exited with {self.code}"


class RunningProcess(Protocol):
    """A process from its start to its end."""

    @property
    def address(self) -> str:
        """host:port on which it serves, as others reach it; empty if it serves nothing."""

    async def wait(self) -> Ending:
        """Wait for its end; then its log is complete, its error file is there, and nothing that it started is left."""

    def terminate(self) -> None:
        """Ask it to end; it ends its own children."""

    def kill(self) -> None:
        """Kill it and everything that it started."""


class Backend(Protocol):
    """A place where processes run."""

    async def start(self, spec: ProcessSpec, log: BoundedLog, stop: asyncio.Event) -> RunningProcess | None:
        """Start a process that appends its output to `log`.

        Returns None if `stop` was set before there was room for it.

        Raises:
            UserError: it cannot be started anywhere.
            OSError: the launcher's own machine cannot start it at the moment.
        """

    async def forget(self, spec: ProcessSpec) -> None:
        """Give back what is kept for the process between its starts: it will not be started again."""
