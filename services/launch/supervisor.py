"""Keeps the processes of a run going, and ends them in order.

A process that dies is started again after a pause; one that exits with 2 was told something wrong, which no restart
mends, so the run ends with its line. Whatever way the run ends, no process of it is left.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from penstock.errors import PenstockError, UserError
from penstock.runtime.process import EXIT_USER_ERROR
from services.launch.child import Child, ProcessSpec, Reaper, State, StopStage
from services.launch.config import LaunchConfig

_MAX_BACKOFF_S = 10.0
_KILL_TIMEOUT_S = 5.0
_NUM_SHOWN_LINES = 20


class ProcessFailedError(PenstockError):
    """A process died so often that starting it again is pointless."""


class Supervisor:
    """The processes of a run. Use `supervised`."""

    def __init__(self, children: Sequence[Child], config: LaunchConfig, report: Callable[[str], None]) -> None:
        """`report` is told in a line what happens to the processes."""
        self.children = children
        self._config = config
        self._report = report
        self._stopping = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str) -> None:
        """Start the process `name`, and again whenever it dies."""
        child = next(child for child in self.children if child.spec.name == name)
        self._tasks[name] = asyncio.create_task(self._keep(child))

    async def wait(self, stop: asyncio.Event) -> None:
        """Return when the run is done or `stop` is set.

        Raises:
            UserError: a process exited with 2; the message is the process's own.
            ProcessFailedError: a process died too often.
        """
        stopped = asyncio.create_task(stop.wait())
        try:
            running: set[asyncio.Task[None]] = set(self._tasks.values())
            await asyncio.wait({stopped, *running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        for task in running:
            if task.done():
                task.result()

    async def stop(self) -> None:
        """End all processes, stage by stage; what does not end within its stage's grace is killed."""
        self._stopping.set()
        grace_s, started = self._config.stop_grace_s, time.monotonic()
        for stage in StopStage:
            num_later = len(StopStage) - 1 - stage
            timeout_s = grace_s * (1 - num_later / 5) - (time.monotonic() - started)
            tasks = {
                self._tasks[c.spec.name]: c
                for c in self.children
                if c.spec.stage == stage and c.spec.name in self._tasks
            }
            for child in tasks.values():
                child.terminate()
            if tasks:
                await asyncio.wait(tasks, timeout=max(0.0, timeout_s))
            for task, child in tasks.items():
                if not task.done() and child.pid is not None:
                    self._report(f"{child.spec.name} did not stop within {timeout_s:.1f} s; killed")
                child.kill()

    async def kill(self) -> None:
        """Kill what is left, at once."""
        self._stopping.set()
        for child in self.children:
            child.kill()
        tasks = list(self._tasks.values())
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=_KILL_TIMEOUT_S)
            for task in pending:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, child: Child) -> None:
        """Run `child` until the run is done with it."""
        name, config = child.spec.name, self._config
        deaths: deque[float] = deque(maxlen=config.max_restarts + 1)
        while not self._stopping.is_set():
            code = await child.run()
            child.state = State.STOPPED
            if self._stopping.is_set() or (code == 0 and child.spec.ends_run):
                return
            if code == EXIT_USER_ERROR:
                raise UserError(_error_line(child))
            now = time.monotonic()
            deaths.append(now)
            num_recent = sum(now - death <= config.restart_window_s for death in deaths)
            how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
            if num_recent > config.max_restarts:
                raise ProcessFailedError(_describe_failure(child, how, num_recent, config.restart_window_s))
            backoff_s = min(_MAX_BACKOFF_S, config.restart_backoff_s * 2 ** (num_recent - 1))
            self._report(f"{name} {how}; starting it again in {backoff_s:g} s")
            child.state = State.RESTARTING
            await self._pause(backoff_s)

    async def _pause(self, duration_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), duration_s)


@asynccontextmanager
async def supervised(
    specs: Sequence[ProcessSpec], *, logs: Path, config: LaunchConfig, report: Callable[[str], None]
) -> AsyncIterator[Supervisor]:
    """A supervisor of `specs` for the time of the context, at whose end all processes are stopped.

    A cancellation while they are being stopped kills them at once.
    """
    reaper = await Reaper.start()
    children = [Child(spec, log_file=logs / f"{spec.name}.log", reaper=reaper) for spec in specs]
    supervisor = Supervisor(children, config, report)
    try:
        try:
            yield supervisor
        finally:
            await supervisor.stop()
    finally:
        await supervisor.kill()
        await reaper.end()


def _error_line(child: Child) -> str:
    """What the process said was wrong: its last line that starts with `error: `."""
    for line in reversed(child.log_since_start().splitlines()):
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    return f"{child.spec.name} cannot start; see {child.log_file}"


def _describe_failure(child: Child, how: str, num_deaths: int, window_s: float) -> str:
    lines = child.log_since_start().splitlines()[-_NUM_SHOWN_LINES:]
    head = f"{child.spec.name} {how}, death {num_deaths} within {window_s:g} s; its log {child.log_file} ends:"
    return "\n".join([head, *(f"  {line}" for line in lines)])
