"""Replies that arrive before their deadline and are read after it, by a service that was not given a core in time."""

import asyncio
import os
import select
import signal
from collections.abc import AsyncIterator

import pytest

from penstock.verdict_status import Status
from services.reward.isolation.pool import WorkerPool
from services.reward.isolation.tasks import SymbolicGold, SymbolicTask
from tests.support.waiting import HANG_S, promptly, settled

_EASY = SymbolicTask(
    golds=(SymbolicGold(text=r"\frac{1}{x+1}", use_text=False, value="", tolerance="0"),),
    body=r"(1+x)^{-1}",
    text=r"(1+x)^{-1}",
)


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    """One worker, that does nothing until it gets SIGCONT."""
    pool = WorkerPool(num_workers=1, memory_limit_bytes=2**28, recycle_after=5000)
    try:
        await pool.start()
        os.kill(pool.worker_pids[0], signal.SIGSTOP)
        yield pool
    finally:
        await pool.close()


async def test_a_reply_that_arrives_while_the_loop_stands_still_counts(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop notices reply and deadline in one turn; the worker goes on."""
    loop, [pid] = asyncio.get_running_loop(), pool.worker_pids
    judging = asyncio.create_task(pool.run(_EASY, HANG_S))
    await settled()
    [worker] = pool._busy
    os.kill(pid, signal.SIGCONT)
    assert select.select([worker._writer.get_extra_info("socket")], [], [], HANG_S)[0]  # the loop stands still
    now = loop.time
    with monkeypatch.context() as patched:
        patched.setattr(loop, "time", lambda: now() + HANG_S)
        reply, _ = await promptly(judging)
    assert (reply.status, reply.credit) == (Status.OK, 1.0)
    assert (pool.worker_pids, pool.num_killed) == ([pid], 0)


async def test_a_cancelled_item_leaves_neither_task_nor_worker(pool: WorkerPool) -> None:
    """The worker would reply to the next item."""
    before, [pid] = asyncio.all_tasks(), pool.worker_pids
    judging = asyncio.create_task(pool.run(_EASY, HANG_S))
    await settled()
    judging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judging
    assert asyncio.all_tasks() == before
    assert (pid in pool.worker_pids, pool.num_killed) == (False, 1)
