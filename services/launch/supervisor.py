"""Keeps the processes of a run running, and stops them in order.

A process that dies is restarted after a pause. One that exits with 2 found a fault that a person must fix: no restart
would help, so the run ends with its error. The exception is a restarted process that lacks something that it had
before, such as a NATS server that is frozen. A process that joins a run that goes on must not end it: one that fails
before it has been ready leaves again. If the process that ends the run fails while it stops, a person is told. However
the run ends, none of its processes is left.
"""

import asyncio
import functools
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, UserError
from penstock.runtime.backoff import Backoff
from penstock.runtime.process import EXIT_INTERRUPTED, EXIT_USER_ERROR
from services.launch.process.backend import Backend, Ending
from services.launch.process.bounded_log import BoundedLog
from services.launch.process.child import Child, State
from services.launch.process.local import local_backend
from services.launch.process.process_trace import ProcessTrace
from services.launch.process.spec import ProcessSpec, StopPhase

MAX_RESTARTS = 10
"""A process that dies more often than this, without a trained step in between, ends the run. A group that kills the
trainer is given up after three deaths, so three such groups in a row are survived."""
_RECOVERED_S = 600.0
"""A process that has run for more seconds has recovered from its earlier deaths. No bound on all of them together: an
engine that loads for minutes, and then dies, would never exceed it."""
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 10.0
_KILL_TIMEOUT_S = 5.0
_FAILED_RUN_GRACE_S = 900.0
"""Seconds for the process that ends the run after another has failed: maybe no one is there to press Ctrl-C again."""
_NUM_SHOWN_LINES = 20
_STOPPED_CODES = frozenset({0, EXIT_INTERRUPTED, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM})
"""Exit codes of a process that did what it was asked to when it was asked to stop. A signal ends it while it still
imports its libraries, when there is nothing to save."""


class ProcessFailedError(PenstockError):
    """A process died so often that restarting it is pointless."""


class Supervisor:
    """The processes of a run. Use `supervised`."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        make_child: Callable[[ProcessSpec], Child],
        report: Callable[[str], None],
        *,
        kill_after_s: float,
        max_restarts: int = MAX_RESTARTS,
        first_backoff_s: float = _FIRST_BACKOFF_S,
        failed_run_grace_s: float = _FAILED_RUN_GRACE_S,
    ) -> None:
        """Supervise the processes of `specs`.

        Args:
            specs: The processes; `add` brings further ones.
            make_child: Returns a process that is not started yet.
            report: Gets a line for each event.
            kill_after_s: Seconds that each has to stop.
            max_restarts: Deaths in a row, without a trained step in between, after which the run ends.
            first_backoff_s: Seconds until the first restart.
            failed_run_grace_s: Seconds for the process that ends the run after another has failed.
        """
        self.children = [make_child(spec) for spec in specs]
        self._make_child = make_child
        self._max_restarts = max_restarts
        self._num_deaths: dict[str, int] = {}
        self._report = report
        self._kill_after_s = kill_after_s
        self._first_backoff_s = first_backoff_s
        self._failed_run_grace_s = failed_run_grace_s
        self.has_begun_to_stop = False
        self._has_failed = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._retiring: dict[str, asyncio.Task[None]] = {}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set by the first process that ends the run, in order or not."""

    @property
    def has_started_all(self) -> bool:
        """Whether every process has been started once: only then can one be retired."""
        return len(self._tasks) == len(self.children)

    @property
    def has_ended(self) -> bool:
        """Whether the run is over, by its end or by a failure: `wait` does not wait any longer."""
        return self._ended.done()

    def start(self, name: str) -> Child:
        """Start the process `name`, and restart it whenever it dies."""
        child = next(child for child in self.children if child.spec.name == name)
        self._keep_in_task(child, self._keep(child))
        return child

    def add(self, spec: ProcessSpec, left: Callable[[], None]) -> None:
        """Start a process that the run did not have, and restart it whenever it dies.

        If what would end the run happens before the process has been ready, the process leaves the run instead, and
        `left` is called.
        """
        child = self._make_child(spec)
        self.children.append(child)
        self._keep_in_task(child, self._keep_added(child, left))

    def retire(self, name: str, ended: Callable[[], None]) -> None:
        """Have the process `name` end in order while the run goes on, and forget it; then call `ended`.

        A process that is leaving already is left to that.
        """
        if name in self._retiring:
            return
        child = next(child for child in self.children if child.spec.name == name)
        child.terminate()
        task = self._tasks[name]

        async def retire() -> None:
            await self._end(child, task)
            await asyncio.wait({task})
            await child.forget()
            self.children.remove(child)
            del self._tasks[name], self._retiring[name]
            self._num_deaths.pop(name, None)
            self._report(f"{name} has left the run")
            ended()

        self._retiring[name] = asyncio.create_task(retire())

    def note_progress(self) -> None:
        """Record that the run trained a step: earlier deaths no longer count."""
        self._num_deaths.clear()

    async def wait(self, stop: asyncio.Event) -> None:
        """Return when the run is done or `stop` is set.

        Raises:
            UserError: a process exited with 2, and the message is its own; or this machine has no room for the first
                start of one.
            ProcessFailedError: a process died too often.
        """
        stopped = asyncio.create_task(stop.wait())
        try:
            ends: set[asyncio.Future[Any]] = {stopped, self._ended}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        if self._ended.done():
            self._has_failed = self._ended.exception() is not None
            self._ended.result()

    async def stop(self) -> None:
        """End all processes, phase by phase; a process that exceeds its grace is killed.

        The process that ends the run has no limit, because it may be in the middle of a step, which then needs a push
        and a checkpoint. It gets a limit if another process fails for good, before or meanwhile. Until it has ended,
        the processes that it needs are kept running.

        Raises:
            UserError: a process exited with 2, meanwhile or because of the stop; the message is the process's own.
            ProcessFailedError: meanwhile a process died too often.
        """
        self.has_begun_to_stop = True
        failure: BaseException | None = None
        for phase in StopPhase:
            ending = [child for child in self.children if child.spec.phase == phase and child.spec.name in self._tasks]
            for child in ending:
                child.terminate()
            tasks = [self._tasks[child.spec.name] for child in ending]  # one that retires may be forgotten meanwhile
            failures = await asyncio.gather(*map(self._end, ending, tasks))
            failure = failure or next(filter(None, failures), None)
        if failure is not None:
            raise failure

    async def kill(self) -> None:
        """Kill the remaining processes at once."""
        await self._stop_retiring()
        for child in self.children:
            child.stop_requested.set()
            child.kill()
        tasks = list(self._tasks.values())
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=_KILL_TIMEOUT_S)
            for task in pending:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stop_retiring()  # one that could not join may have begun to leave just now
        if self._ended.done() and not self._ended.cancelled():
            self._ended.exception()  # whoever stopped the run knows it, or did not ask
        for child in self.children:
            await child.forget()

    async def _stop_retiring(self) -> None:
        for retiring in self._retiring.values():
            retiring.cancel()
        await asyncio.gather(*self._retiring.values(), return_exceptions=True)

    def _keep_in_task(self, child: Child, keeping: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[child.spec.name] = asyncio.create_task(keeping)
        task.add_done_callback(functools.partial(self._note_end, child))

    async def _keep_added(self, child: Child, left: Callable[[], None]) -> None:
        """Run a process that joined; see `add`."""
        try:
            await self._keep(child)
        except (PenstockError, OSError) as failure:
            if child.has_been_up:
                raise
            self._report(f"{child.spec.name} cannot join the run, which goes on without it: {failure}")
            self.retire(child.spec.name, left)

    def _note_end(self, child: Child, task: "asyncio.Task[None]") -> None:
        """Note that `child` is no longer kept: the run has ended, unless it only leaves."""
        if task.cancelled() or self._ended.done():
            return
        if (failure := task.exception()) is not None:
            self._ended.set_exception(failure)
        elif child.spec.name not in self._retiring:
            self._ended.set_result(None)

    async def _end(self, child: Child, task: "asyncio.Task[None]") -> BaseException | None:
        """Wait for the end of `child`, which `task` keeps, and kill it after its grace; return the run's failure.

        That is the failure which limited its time, or else its own if it ends the run; none if `wait` raised one.
        """
        limit_s, failure = self._kill_after_s, None
        if child.spec.ends_run:
            limit_s = self._failed_run_grace_s
            if not self._has_failed and (failure := await self._failure_before_end_of(task)) is not None:
                self._report(f"{failure}\n{child.spec.name} has {limit_s:g} s to stop")
        await asyncio.wait({task}, timeout=limit_s)
        if not task.done() and child.is_running:
            child.kill()
            self._report(f"{child.spec.name} did not stop within {limit_s:g} s; killed")
        if child.spec.ends_run and not self._has_failed and failure is None and task.done() and not task.cancelled():
            failure = task.exception()
        return failure

    async def _failure_before_end_of(self, task: "asyncio.Task[None]") -> BaseException | None:
        """Wait for the end of `task`; return early if another process, which it may be waiting for, fails for good."""
        running: set[asyncio.Task[None]] = set(self._tasks.values())
        while not task.done():
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for each in done - {task}:
                if (failure := each.exception()) is not None:
                    return failure
        return None

    async def _keep(self, child: Child) -> None:
        """Run `child` until it is asked to stop or has ended the run."""
        name = child.spec.name
        num_failures = 0
        while not child.stop_requested.is_set():
            ending = await child.run()
            ended_in, child.state = child.state, State.STOPPED
            if child.stop_requested.is_set():
                if child.spec.ends_run and not child.was_killed and ending.code not in _STOPPED_CODES:
                    self._report_failure_to_stop(child, ending)
                return
            if ending.code == 0 and child.spec.ends_run:
                return
            if ending.code == EXIT_USER_ERROR and not child.lacks_what_it_had(ended_in):
                raise UserError(child.read_error() or f"{name} cannot start; see {child.log.path}")
            num_deaths = 1 if child.age_s > _RECOVERED_S else self._num_deaths.get(name, 0) + 1
            self._num_deaths[name] = num_deaths
            how = ending.describe()
            if num_deaths > self._max_restarts:
                raise ProcessFailedError(_with_log(child, f"{how}, death {num_deaths} in a row without a trained step"))
            num_failures = 1 if child.age_s > _MAX_BACKOFF_S else num_failures + 1
            backoff_s = Backoff(self._first_backoff_s, _MAX_BACKOFF_S).after(num_failures)
            self._report(f"{name} {how}; starting it again in {backoff_s:g} s{_reason(child)}")
            child.state = State.RESTARTING
            with suppress(TimeoutError):
                await asyncio.wait_for(child.stop_requested.wait(), backoff_s)

    def _report_failure_to_stop(self, child: Child, ending: Ending) -> None:
        """Report the failure of the process that ends the run, after it was asked to stop.

        Unless a person must mend something, the run counts as stopped: whoever starts it again, as Slurm does with a
        preempted job, lets it go on from its last checkpoint.

        Raises:
            UserError: the process's own.
        """
        how = f"{ending.describe()} after it was asked to stop; steps after its last checkpoint are lost"
        self._report(f"{child.spec.name} {how}{_reason(child)}; its log is {child.log.path}")
        if ending.code == EXIT_USER_ERROR:
            raise UserError(child.read_error() or f"{child.spec.name} {how}; see {child.log.path}")


@asynccontextmanager
async def supervised(
    specs: Sequence[ProcessSpec],
    *,
    logs: Path,
    report: Callable[[str], None],
    kill_after_s: float,
    max_restarts: int = MAX_RESTARTS,
    first_backoff_s: float = _FIRST_BACKOFF_S,
    failed_run_grace_s: float = _FAILED_RUN_GRACE_S,
    trace: ProcessTrace | None = None,
    backend: Backend | None = None,
) -> AsyncIterator[Supervisor]:
    """Yield a supervisor of `specs`; at the end of the context, stop all processes that are not stopped yet.

    `backend` starts them; None: they run on this machine. A cancellation while they are being stopped, here or in the
    context, kills them at once.
    """
    async with AsyncExitStack() as stack:
        if backend is None:
            backend = await stack.enter_async_context(local_backend())

        def make_child(spec: ProcessSpec) -> Child:
            return Child(spec, log=BoundedLog(logs / f"{spec.name}.log"), backend=backend, trace=trace)

        supervisor = Supervisor(
            specs,
            make_child,
            report,
            kill_after_s=kill_after_s,
            max_restarts=max_restarts,
            first_backoff_s=first_backoff_s,
            failed_run_grace_s=failed_run_grace_s,
        )
        try:
            try:
                yield supervisor
            finally:
                if not supervisor.has_begun_to_stop:
                    await supervisor.stop()
        finally:
            await supervisor.kill()


def _reason(child: Child) -> str:
    """Return ": " and the error that the process wrote as it ended, in one line; nothing if it wrote none."""
    why = " ".join((child.read_error() or "").split())
    return f": {why}" if why else ""


def _with_log(child: Child, how: str) -> str:
    """Return how the process ended, and the end of its log."""
    lines = child.log.last_lines(_NUM_SHOWN_LINES)
    return "\n".join([f"{child.spec.name} {how}; its log {child.log.path} ends:", *(f"  {line}" for line in lines)])
