"""Worker processes, one item each at a time, under wall-clock deadlines that are held here and end with SIGKILL.

Invariants: a worker that was cut short, in whatever way, is never used again; a worker that dies through no fault of
its item loses no item; `run` always returns within the deadline, once a worker is free.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator

import structlog

from penstock.errors import OverloadedError
from services.reward.isolation.tasks import Task, WorkerReply
from services.reward.isolation.worker_process import Forkserver, WorkerDiedError, WorkerProcess
from services.reward.verdict import Status

log = structlog.get_logger()

_MAX_DEATHS = 3
"""Workers that may die over one item before the item is blamed."""
_MAX_BACKOFF_S = 5.0


class WorkerPool:
    """A fixed number of worker processes, and a bounded number of items. Start and close it in one event loop."""

    def __init__(self, *, num_workers: int, memory_limit_bytes: int, recycle_after: int, max_queue: int) -> None:
        self._num_workers = num_workers
        self._recycle_after = recycle_after
        self._max_queue = max_queue
        self._num_reserved = 0
        self._forkserver = Forkserver(memory_limit_bytes)
        self._workers: set[WorkerProcess] = set()
        self._idle: asyncio.LifoQueue[WorkerProcess] = asyncio.LifoQueue()
        self._refills: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()
        self._is_closing = False

    async def start(self) -> None:
        """Start the forkserver and all workers.

        Raises:
            WorkerDiedError: they do not come up.
        """
        await self._forkserver.start()
        for _ in range(self._num_workers):
            self._add(await self._forkserver.spawn())

    async def close(self) -> None:
        """Kill all workers and the forkserver, and wait until they are gone. Cancel waiting calls of `run` first."""
        self._is_closing = True
        for task in self._refills:
            task.cancel()
        await asyncio.gather(*self._refills, return_exceptions=True)
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        await self._forkserver.stop()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers alive."""
        return sorted(worker.pid for worker in self._workers)

    @contextlib.contextmanager
    def reserve(self, num_items: int) -> Iterator[None]:
        """Hold places for `num_items` items while the context lasts.

        Raises:
            OverloadedError: there are not so many places left.
        """
        if self._num_reserved + num_items > self._max_queue:
            raise OverloadedError(
                f"the queue holds {self._num_reserved} of {self._max_queue} items and {num_items} more do not fit; "
                "try again later, or raise reward.max_queue"
            )
        self._num_reserved += num_items
        try:
            yield
        finally:
            self._num_reserved -= num_items

    async def run(self, task: Task, deadline_s: float) -> tuple[WorkerReply, float]:
        """Have a worker do `task` and return its reply and the seconds that it took, queueing excluded.

        When the deadline passes or the caller is cancelled, the worker is killed and replaced.
        """
        spent_s = 0.0
        for _ in range(_MAX_DEATHS):
            worker = await self._take_idle()
            started = time.monotonic()
            try:
                async with asyncio.timeout(deadline_s - spent_s):
                    reply = await worker.ask(task, cpu_limit_s=math.ceil(deadline_s) + 1)
            except TimeoutError:
                self._replace(worker)
                return WorkerReply(status=Status.TIMEOUT), spent_s + time.monotonic() - started
            except WorkerDiedError:
                spent_s += time.monotonic() - started
                log.warning("worker.died", pid=worker.pid, elapsed_s=round(spent_s, 3))
                self._replace(worker)
            except BaseException:
                self._replace(worker)
                raise
            else:
                if reply.status is Status.OUT_OF_MEMORY or worker.num_items >= self._recycle_after:
                    self._replace(worker)
                else:
                    self._idle.put_nowait(worker)
                return reply, spent_s + time.monotonic() - started
        return WorkerReply(status=Status.OUT_OF_MEMORY), spent_s

    async def _take_idle(self) -> WorkerProcess:
        while True:
            worker = await self._idle.get()
            if worker.is_alive:
                return worker
            log.warning("worker.died", pid=worker.pid)
            self._replace(worker)

    def _add(self, worker: WorkerProcess) -> None:
        self._workers.add(worker)
        self._idle.put_nowait(worker)

    def _replace(self, worker: WorkerProcess) -> None:
        worker.kill()
        self._workers.discard(worker)
        if self._is_closing:
            return  # an item may be cancelled while, or after, the pool closes
        task = asyncio.create_task(self._refill())
        self._refills.add(task)
        task.add_done_callback(self._refills.discard)

    async def _refill(self) -> None:
        """Add one worker, with a new forkserver if the old one is gone."""
        backoff_s = 0.1
        async with self._starting:
            while True:
                try:
                    self._add(await self._forkserver.spawn())
                    return
                except WorkerDiedError as error:
                    log.warning("forkserver.died", reason=str(error))
                try:
                    await self._forkserver.stop()
                    await self._forkserver.start()
                except WorkerDiedError as error:
                    log.error("forkserver.failed", reason=str(error), retry_in_s=backoff_s)
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
