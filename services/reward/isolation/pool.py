"""Worker processes, one item each at a time, with wall-clock deadlines that are kept here and enforced by SIGKILL."""

import asyncio
import math
import os
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import structlog

from penstock.runtime import security
from penstock.runtime.backoff import Backoff
from penstock.runtime.isolation.forkserver_process import Forkserver, WorkerDiedError
from penstock.runtime.isolation.forkserver_protocol import Sandbox
from penstock.runtime.process import end_task
from penstock.verdict_status import Status
from services.reward.isolation.permits import Permit, Permits
from services.reward.isolation.tasks import Task, VerifierTask, WorkerReply, WorkerSettings
from services.reward.isolation.worker_process import WorkerProcess

log = structlog.get_logger()

_MAX_DEATHS = 3
"""Workers that may die over one item before the item is blamed."""
_BACKOFF = Backoff(first_s=0.1, max_s=5.0)
_OVERTIME_AFTER_S = 0.01
"""A few times what a typical item takes."""
_DEMOTED_AFTER_S = (0.04, 0.3)
"""Seconds of an item's processor time at which its worker is demoted; wall-clock time grows when cores are shared."""
_WATCH_INTERVAL_S = 0.02
_NUM_LATE_TURNS = 10
"""Turns of the event loop after an item's deadline, to read a reply that arrived while the loop stood still."""


class WorkerPool:
    """A fixed number of worker processes, with spares. Start and close it in one event loop."""

    def __init__(
        self,
        *,
        num_workers: int,
        memory_limit_bytes: int,
        recycle_after: int,
        max_overtime: int = 0,
        overtime_memory_bytes: int = 256 * 2**20,
        sandbox: Sandbox = "auto",
        verifiers: Mapping[str, str] | None = None,
    ) -> None:
        """Create a pool that is not yet started.

        Args:
            num_workers: Items at work at once, those in overtime not counted.
            memory_limit_bytes: Address space that a worker may take beyond what it has when it is forked.
            recycle_after: Items after which a worker is replaced.
            max_overtime: Items that may be in overtime at once; beyond it, hanging workers keep their permits.
            overtime_memory_bytes: Memory that workers may allocate together; beyond it, the largest worker is killed.
            sandbox: Whether workers are confined, see `ForkserverSettings`.
            verifiers: Custom verifiers by name, see `WorkerSettings`.
        """
        self.num_killed = 0
        """Number of workers killed over their item, by deadline, cancellation or memory, since the start."""
        self._num_ready = 2 * num_workers if max_overtime else num_workers
        self._recycle_after = recycle_after
        self._overtime_memory_bytes = overtime_memory_bytes
        self._forkserver = Forkserver(
            "services.reward.isolation.forkserver",
            WorkerSettings(memory_limit_bytes=memory_limit_bytes, verifiers=dict(verifiers or {})),
            sandbox=sandbox,
            environment={name: value for name, value in os.environ.items() if name not in security.VARIABLES},
            hint="; is math-verify installed? pip install 'penstock[reward]'",
        )
        self._permits = Permits(num_workers, max_overtime, _OVERTIME_AFTER_S)
        self._workers: set[WorkerProcess] = set()
        self._idle: asyncio.LifoQueue[WorkerProcess] = asyncio.LifoQueue()
        self._busy: dict[WorkerProcess, Permit] = {}
        self._condemned: set[WorkerProcess] = set()
        self._is_short = asyncio.Event()
        self._has_overtime = asyncio.Event()
        self._background: list[asyncio.Task[None]] = []
        self._fresh_bytes = 0

    async def start(self) -> None:
        """Start the forkserver and all workers.

        Raises:
            WorkerDiedError: they do not come up.
            OSError: no socket or process is available.
        """
        await self._forkserver.start()
        while len(self._workers) < self._num_ready:
            self._add(WorkerProcess(await self._forkserver.spawn(), self._forkserver))
        self._fresh_bytes = max(worker.resident_bytes for worker in self._workers)
        self._background = [asyncio.create_task(self._refill()), asyncio.create_task(self._watch())]

    async def close(self) -> None:
        """Kill all workers and the forkserver, and wait for their end. Cancel waiting calls of `run` first."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        await self._forkserver.stop()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the living workers."""
        return sorted(worker.pid for worker in self._workers)

    @property
    def num_workers(self) -> int:
        """Number of living workers, including spare ones and those in overtime."""
        return len(self._workers)

    @property
    def num_busy(self) -> int:
        """Number of workers with an item, including those in overtime."""
        return len(self._busy)

    @property
    def num_overtime(self) -> int:
        """Number of workers whose item is in overtime."""
        return self._permits.num_overtime

    @property
    def num_waiting(self) -> int:
        """Number of items that wait for a permit."""
        return self._permits.num_waiting

    async def run(self, task: Task, deadline_s: float) -> tuple[WorkerReply, float]:
        """Have a worker do `task` and return its reply and the seconds that it took, without queueing.

        When the deadline passes or the caller is cancelled, the worker is killed and replaced.
        """
        spent_s = 0.0
        for _ in range(_MAX_DEATHS):
            async with self._permits.acquire() as permit:
                worker = await self._take_idle(permit)
                started = time.monotonic()
                try:
                    permit.start(self._on_overtime)
                    asking = worker.ask(task, cpu_limit_s=_cpu_limit_s(task, deadline_s))
                    reply = await _reply_within(deadline_s - spent_s, asking)
                except TimeoutError:
                    self.num_killed += 1
                    return WorkerReply(status=Status.TIMEOUT), spent_s + time.monotonic() - started
                except asyncio.CancelledError:
                    self.num_killed += 1
                    raise
                except WorkerDiedError:
                    spent_s += time.monotonic() - started
                    if worker in self._condemned:
                        self.num_killed += 1
                        return WorkerReply(status=Status.OUT_OF_MEMORY), spent_s
                    log.warning("worker.died", pid=worker.pid, elapsed_s=round(spent_s, 3))
                else:
                    if not (reply.is_spoilt or worker.num_demotions or worker.num_items >= self._recycle_after):
                        self._idle.put_nowait(worker)
                        del self._busy[worker]
                    return reply, spent_s + time.monotonic() - started
                finally:
                    if worker in self._busy:
                        self._discard(worker)
        self.num_killed += 1
        if isinstance(task, VerifierTask):
            detail = f"it ended its worker process, {_MAX_DEATHS} times"
            return WorkerReply(status=Status.FAILED, detail=detail), spent_s
        return WorkerReply(status=Status.OUT_OF_MEMORY), spent_s  # the usual end of native code without memory

    async def _take_idle(self, permit: Permit) -> WorkerProcess:
        while True:
            worker = await self._idle.get()
            if worker.is_alive:
                self._busy[worker] = permit
                return worker
            log.warning("worker.died", pid=worker.pid)
            self._discard(worker)

    def _add(self, worker: WorkerProcess) -> None:
        self._workers.add(worker)
        self._idle.put_nowait(worker)

    def _discard(self, worker: WorkerProcess) -> None:
        worker.kill()
        self._busy.pop(worker, None)
        self._condemned.discard(worker)
        self._workers.discard(worker)
        self._is_short.set()

    def _on_overtime(self) -> None:
        self._is_short.set()
        self._has_overtime.set()

    async def _refill(self) -> None:
        """Keep the required number of workers, with a new forkserver if the old one is gone."""
        num_failures = 0
        while True:
            while len(self._workers) - self.num_overtime >= self._num_ready:
                self._is_short.clear()
                await self._is_short.wait()
            try:
                await self._spawn()
                num_failures = 0
                if self.num_overtime == 0:
                    self._shrink()  # its item has ended meanwhile
            except (WorkerDiedError, OSError) as error:
                num_failures += 1
                wait_s = _BACKOFF.after(num_failures)
                log.error("forkserver.failed", reason=str(error), retry_in_s=wait_s)
                await asyncio.sleep(wait_s)

    async def _spawn(self) -> None:
        try:
            self._add(WorkerProcess(await self._forkserver.spawn(), self._forkserver))
        except WorkerDiedError as error:
            log.warning("forkserver.died", reason=str(error))
            await self._forkserver.stop()
            await self._forkserver.start()

    async def _watch(self) -> None:
        """While items are in overtime, demote workers that compute for long, and kill the largest if together too
        large.
        """
        while True:
            if self.num_overtime == 0:
                self._shrink()
                self._has_overtime.clear()
                await self._has_overtime.wait()
            await asyncio.sleep(_WATCH_INTERVAL_S)
            grown_bytes = {}
            for worker in self._busy:
                steps = _DEMOTED_AFTER_S[worker.num_demotions :]
                if steps and worker.item_cpu_s > steps[0]:
                    worker.demote()
                grown_bytes[worker] = max(0, worker.resident_bytes - self._fresh_bytes)
            while sum(grown_bytes.values()) > self._overtime_memory_bytes:
                largest = max(grown_bytes, key=lambda worker: grown_bytes[worker])
                del grown_bytes[largest]
                self._condemned.add(largest)
                largest.kill()

    def _shrink(self) -> None:
        """End surplus idle workers: lent ones, and those back from overtime."""
        while len(self._workers) > self._num_ready and not self._idle.empty():
            self._discard(self._idle.get_nowait())


async def _reply_within(deadline_s: float, asking: Coroutine[Any, Any, WorkerReply]) -> WorkerReply:
    """Return the reply that arrives by the deadline, even if the event loop stands still meanwhile.

    Raises:
        TimeoutError: none has arrived.
        WorkerDiedError: the worker died, or broke the protocol.
    """
    asked = asyncio.create_task(asking)
    try:
        await asyncio.wait({asked}, timeout=deadline_s)
        for _ in range(_NUM_LATE_TURNS):
            if asked.done():
                return asked.result()
            await asyncio.sleep(0)
        raise TimeoutError
    finally:
        await end_task(asked)


def _cpu_limit_s(task: Task, deadline_s: float) -> int:
    """Return more processor time than `task` can take until its deadline: what ends a worker that nobody kills.

    Custom verifiers may compute in threads, whose times add up.
    """
    num_cores = (os.cpu_count() or 1) if isinstance(task, VerifierTask) else 1
    return num_cores * (math.ceil(deadline_s) + 1)
