"""The worker pool: real processes that hang, eat memory, are killed and try to get out, and no item is lost."""

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from penstock.runtime.isolation import forkserver_process
from penstock.runtime.isolation.forkserver_process import WorkerDiedError
from penstock.verdict_status import Status
from services.reward.isolation.pool import WorkerPool
from services.reward.isolation.tasks import SymbolicGold, SymbolicTask, VerifierTask, WorkerReply
from tests.support.processes import is_alive, open_files_left
from tests.support.reward import misbehaving_verifiers
from tests.support.reward.service import parent_of
from tests.support.waiting import HANG_S, promptly, until

pytestmark = pytest.mark.leaves_behind("the module's pool replaces workers, and their pipes", "descriptor")

_EASY = SymbolicTask(
    golds=(SymbolicGold(text=r"\frac{1}{x+1}", use_text=False, value="", tolerance="0"),),
    body=r"(1+x)^{-1}",
    text=r"(1+x)^{-1}",
)
_VERIFIERS = {
    name: f"{misbehaving_verifiers.__file__}:{function}" for name, function in (("bad", "verify"), ("out", "escape"))
}


def _bad(response: str) -> VerifierTask:
    return VerifierTask(verifier="bad", golds=("1",), response=response, prompt="")


@contextlib.asynccontextmanager
async def _running(
    *, num_workers: int = 2, memory_limit_mb: int = 256, recycle_after: int = 5000, max_overtime: int = 8
) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(
        num_workers=num_workers,
        memory_limit_bytes=memory_limit_mb * 2**20,
        recycle_after=recycle_after,
        max_overtime=max_overtime,
        sandbox="require",
        verifiers=_VERIFIERS,
    )
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


@pytest.fixture(scope="module")
async def pool() -> AsyncIterator[WorkerPool]:
    """Two workers that others do not spoil for good."""
    async with _running() as running:
        yield running


async def _all(pool: WorkerPool, *tasks: SymbolicTask | VerifierTask, deadline_s: float = 600.0) -> list[WorkerReply]:
    return [reply for reply, _ in await asyncio.gather(*(pool.run(task, deadline_s) for task in tasks))]


async def test_items_that_hang_do_not_hold_up_the_others(pool: WorkerPool) -> None:
    """More of them than there are workers hang, and the others are done long before their deadline."""
    hanging = [asyncio.create_task(pool.run(_bad(way), 600.0)) for way in ("spin", "sleep", "spin", "sleep")]
    await until(lambda: pool.num_overtime == 4)
    replies = await _all(pool, *[_EASY] * 50)
    assert {reply.credit for reply in replies} == {1.0}
    assert not any(item.done() for item in hanging)
    assert pool.num_busy == 4
    for item in hanging:
        item.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    await until(lambda: (pool.num_workers, pool.num_busy, pool.num_overtime) == (4, 0, 0))


async def test_items_that_hang_get_all_of_their_time(pool: WorkerPool) -> None:
    """Overtime does not shorten it: each ends at its own deadline, and its verdict tells the seconds."""
    deadlines_s = (0.5, 0.6, 0.7, 0.8)
    hanging = [pool.run(_bad(way), each) for way, each in zip(("spin", "sleep") * 2, deadlines_s, strict=True)]
    for (reply, elapsed_s), deadline_s in zip(await asyncio.gather(*hanging), deadlines_s, strict=True):
        assert (reply.status, reply.credit) == (Status.TIMEOUT, 0.0)
        assert elapsed_s >= deadline_s
    await until(lambda: (pool.num_workers, pool.num_busy, pool.num_overtime) == (4, 0, 0))


@pytest.mark.slow
async def test_a_spare_worker_that_comes_late_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The item whose permit was lent has ended by then."""
    async with _running() as pool:
        spawn, may_come, has_come = pool._forkserver.spawn, asyncio.Event(), asyncio.Event()

        async def spawn_late() -> Any:
            spawned = await spawn()
            await may_come.wait()
            has_come.set()
            return spawned

        monkeypatch.setattr(pool._forkserver, "spawn", spawn_late)
        with monkeypatch.context() as patched:
            patched.setattr(pool._permits, "overtime_after_s", 0.0)  # the spare worker is wanted before the nap is over
            await _all(pool, _bad("nap 0.3"))
        await until(lambda: not pool._has_overtime.is_set())
        may_come.set()
        await promptly(has_come.wait())
        await _all(pool, _EASY)
        await until(lambda: (pool.num_workers, pool.num_overtime) == (4, 0))


@pytest.mark.slow
async def test_only_so_many_items_are_in_overtime() -> None:
    """Then those that hang hold their turn, and the others wait for one of them to end."""
    async with _running(num_workers=1, max_overtime=2) as pool:
        killed = pool.num_killed
        hanging = [asyncio.create_task(pool.run(_bad("sleep"), 600.0)) for _ in range(3)]
        await until(lambda: pool.num_busy == 3)
        easy = asyncio.create_task(pool.run(_EASY, 600.0))
        await until(lambda: (pool.num_overtime, pool.num_waiting) == (2, 1))
        assert not easy.done()
        hanging[0].cancel()
        assert (await promptly(easy))[0].credit == 1.0
        for item in hanging:
            item.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        assert pool.num_killed == killed + 3


async def test_a_slow_item_gets_its_verdict(pool: WorkerPool) -> None:
    """Overtime costs it its turn and its priority, not its verdict."""
    replies = await _all(pool, _bad("busy 0.4"), _EASY, _bad("busy 0.4"))
    assert [(reply.status, reply.credit) for reply in replies] == [(Status.OK, 1.0)] * 3


@pytest.mark.slow
async def test_a_demoted_item_keeps_a_share_of_a_busy_core() -> None:
    """Its priority is the lowest that others cannot starve: idle cores may not come before its deadline."""
    async with _running(num_workers=1) as pool:
        spinning = asyncio.create_task(pool.run(_bad("spin"), 600.0))
        await until(lambda: 19 in {os.getpriority(os.PRIO_PROCESS, pid) for pid in pool.worker_pids})
        assert {os.sched_getscheduler(pid) for pid in pool.worker_pids} == {os.SCHED_OTHER}
        spinning.cancel()
        await asyncio.gather(spinning, return_exceptions=True)


@pytest.mark.parametrize("max_overtime", [0, pytest.param(8, marks=pytest.mark.slow)])
async def test_an_item_that_eats_memory_is_stopped(max_overtime: int) -> None:
    """Its worker is replaced, and the next item is verified."""
    async with _running(num_workers=1, max_overtime=max_overtime) as pool:
        before = pool.worker_pids
        (reply,) = await _all(pool, _bad("eat"))
        assert (reply.status, reply.credit) == (Status.OUT_OF_MEMORY, 0.0)
        (reply,) = await _all(pool, _EASY)
        assert reply.credit == 1.0
        await until(lambda: len(pool.worker_pids) == len(before))
        assert pool.worker_pids != before


async def test_what_one_item_took_is_not_held_against_the_next() -> None:
    """An answer that is wrong is wrong, though the one before it, which was right, all but ran out of memory."""
    wrong = SymbolicTask(golds=_EASY.golds, body=r"(2+x)^{-1}", text=r"(2+x)^{-1}")
    async with _running(num_workers=1, max_overtime=0) as pool:
        replies = [(await pool.run(task, 600.0))[0] for task in (_bad("peak"), wrong)]
    assert [(reply.status, reply.credit) for reply in replies] == [(Status.OK, 1.0), (Status.OK, 0.0)]


@pytest.mark.slow
async def test_items_that_eat_memory_together_are_stopped() -> None:
    """Each would be allowed what it takes; all of them are not."""
    async with _running(num_workers=2, memory_limit_mb=2048) as pool:
        replies = await _all(pool, *[_bad("eat")] * 4)
        assert {reply.status for reply in replies} == {Status.OUT_OF_MEMORY}


async def test_killed_workers_lose_no_item() -> None:
    """Items whose worker is killed from outside are verified by another."""
    async with _running() as pool:
        pending = [asyncio.create_task(_all(pool, _bad("busy 0.01"))) for _ in range(100)]
        for num_done in (10, 20, 30, 40):
            await until(lambda num_done=num_done: sum(item.done() for item in pending) >= num_done)
            for pid in pool.worker_pids[:1]:
                os.kill(pid, signal.SIGKILL)
        assert [reply.credit for (reply,) in await asyncio.gather(*pending)] == [1.0] * 100
        await until(lambda: len(pool.worker_pids) == 4)


async def test_a_verifier_that_kills_its_worker_is_blamed(pool: WorkerPool) -> None:
    """After some workers, by a status that says so, and the others go on."""
    replies = await _all(pool, _EASY, _bad("die"), _EASY)
    assert [reply.credit for reply in replies] == [1.0, 0.0, 1.0]
    assert replies[1].status is Status.FAILED
    assert replies[1].detail == "it ended its worker process, 3 times"


@pytest.mark.parametrize("way", ["forge", "flood"])
async def test_a_verifier_that_writes_replies_itself_harms_no_other_item(way: str) -> None:
    """Its item is blamed; the next one on that worker does not get the reply that is left over."""
    async with _running(num_workers=1, max_overtime=0) as pool:
        replies = await _all(pool, _bad(way), _EASY, _EASY)
    assert [reply.status for reply in replies] == [Status.FAILED, Status.OK, Status.OK]
    assert [reply.credit for reply in replies] == [0.0, 1.0, 1.0]


@contextlib.contextmanager
def _at_most_open_files(num_files: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_workers_come_back_after_open_files_ran_out() -> None:
    """While no socket can be opened there are fewer workers; afterwards there are as many as before."""
    async with _running(num_workers=1, max_overtime=0) as pool:
        (before,) = pool.worker_pids
        with _at_most_open_files(4), capture_logs() as events:
            os.kill(before, signal.SIGKILL)
            pending = asyncio.create_task(pool.run(_EASY, 600.0))
            await until(lambda: "forkserver.failed" in [event["event"] for event in events])
            assert (pool.num_workers, pending.done()) == (0, False)
        async with asyncio.timeout(HANG_S):
            assert (await pending)[0].credit == 1.0


@pytest.mark.slow
async def test_a_forkserver_without_descriptors_keeps_its_workers() -> None:
    """It says why it cannot fork, and forks again when it can."""
    async with _running(num_workers=1, max_overtime=0) as pool:
        (worker,) = pool.worker_pids
        server = psutil.Process(worker).ppid()
        with open_files_left(server, 0), capture_logs() as events:
            os.kill(worker, signal.SIGKILL)
            pending = asyncio.create_task(pool.run(_EASY, 600.0))
            await until(lambda: any("Too many open files" in str(event) for event in events))
        async with asyncio.timeout(HANG_S):
            assert (await pending)[0].credit == 1.0
        (worker,) = pool.worker_pids
        assert psutil.Process(worker).ppid() == server


async def test_a_forkserver_starts_beside_very_many_open_files() -> None:
    """More than `select` can tell apart, as a server with as many clients has."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1300:
        pytest.skip("needs 1300 open files")
    with contextlib.ExitStack() as stack, _at_most_open_files(hard):
        for _ in range(1100):
            stack.callback(os.close, os.dup(0))
        async with _running(num_workers=1) as pool:
            assert (await pool.run(_EASY, 600.0))[0].credit == 1.0


@pytest.mark.slow
async def test_a_killed_forkserver_is_started_again() -> None:
    """Its workers go with it; new ones come, and no item is lost."""
    async with _running() as pool:
        os.kill(parent_of(pool.worker_pids[0]), signal.SIGKILL)
        replies = await _all(pool, *[_EASY] * 20)
        assert [reply.credit for reply in replies] == [1.0] * 20


@pytest.mark.slow
async def test_a_forkserver_that_is_ready_too_late_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its word that it is ready is nobody's process: another one is started, and its workers are the pool's."""
    async with _running(num_workers=1) as pool:
        monkeypatch.setattr(forkserver_process, "_START_TIMEOUT_S", 0.01)
        with capture_logs() as logs:
            workers = pool.worker_pids
            os.kill(parent_of(workers[0]), signal.SIGKILL)
            await until(lambda: not any(map(is_alive, workers)))  # one would judge, and nobody miss the forkserver
            judging = asyncio.create_task(pool.run(_EASY, 600.0))
            await until(lambda: any(entry["event"] == "forkserver.failed" for entry in logs))
        monkeypatch.setattr(forkserver_process, "_START_TIMEOUT_S", HANG_S)
        reply, _ = await judging
        assert reply.credit == 1.0
        assert all(pid > 0 for pid in pool.worker_pids)
        assert {parent_of(pid) for pid in pool.worker_pids} <= {each.pid for each in psutil.Process().children()}


@pytest.mark.slow
async def test_workers_are_recycled() -> None:
    """After this many items a worker makes place for a fresh one."""
    async with _running(num_workers=1, recycle_after=5, max_overtime=0) as pool:
        (before,) = pool.worker_pids
        replies = await _all(pool, *[_EASY] * 12)
        assert [reply.credit for reply in replies] == [1.0] * 12
        await until(lambda: len(pool.worker_pids) == 1)
        assert pool.worker_pids != [before]
        await until(lambda: not is_alive(before))


async def test_a_worker_in_which_a_verifier_left_a_thread_gets_no_other_item() -> None:
    """The thread would see it. One whose threads have ended stays."""
    async with _running(num_workers=1, max_overtime=0) as pool:
        (before,) = pool.worker_pids
        replies = await _all(pool, _bad("end a thread"), _EASY)
        assert [reply.credit for reply in replies] == [1.0, 1.0]
        assert pool.worker_pids == [before]
        replies = await _all(pool, _bad("leave a thread"), _EASY)
        assert [reply.credit for reply in replies] == [1.0, 1.0]
        assert before not in pool.worker_pids
        await until(lambda: not is_alive(before))


@pytest.mark.slow
async def test_many_kills_leave_nothing_behind() -> None:
    """No process, no zombie, no open file and no task stays after 200 items that hang or are cancelled."""

    def left() -> tuple[int, int, int, int]:
        children = Path(f"/proc/{forkserver}/task/{forkserver}/children").read_text().split()
        num_files = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", str(forkserver)))
        return len(pool.worker_pids), len(children), num_files, len(asyncio.all_tasks())

    async with _running(num_workers=2) as pool:
        forkserver = parent_of(pool.worker_pids[0])
        await _all(pool, *[_EASY] * 10)
        before = None
        while before != left():  # the other pool may still be at it
            before = left()
            await asyncio.sleep(2.0)  # until nothing changes for this long
        for _ in range(10):
            await _all(pool, *[_bad("sleep")] * 10, deadline_s=0.05)
            items = [asyncio.create_task(pool.run(_bad("spin"), 600.0)) for _ in range(10)]
            await until(lambda: pool.num_busy == 10)
            for item in items:
                item.cancel()
            await asyncio.gather(*items, return_exceptions=True)
        assert pool.num_killed == 200
        with contextlib.suppress(TimeoutError):
            await until(lambda: left() == before)
        assert left() == before


async def test_a_cancelled_item_frees_its_worker(pool: WorkerPool) -> None:
    """Running or waiting, it is gone at once."""
    items = [asyncio.create_task(pool.run(_bad("spin"), 600.0)) for _ in range(20)]
    await until(lambda: pool.num_busy == 10)
    assert pool.num_waiting == 10
    busy = set(pool.worker_pids)
    for item in items:
        item.cancel()
    await asyncio.gather(*items, return_exceptions=True)
    assert (pool.num_busy, pool.num_waiting) == (0, 0)
    (reply,) = await _all(pool, _EASY)
    assert reply.credit == 1.0
    await until(lambda: len([pid for pid in busy if is_alive(pid)]) <= 2)


@pytest.mark.parametrize("way", misbehaving_verifiers.WAYS_OUT)
async def test_a_worker_cannot_reach_out(pool: WorkerPool, tmp_path: Path, way: str) -> None:
    """Not to the network, to other processes or to files; the attempt fails, and the worker goes on."""
    file = tmp_path / "file"
    file.write_text("ours")
    if way == "connect":
        listener = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        host, port = listener.sockets[0].getsockname()
        target = f"{host}:{port}"
    else:
        listener = None
        target = str(os.getpid()) if "server" in way else str(file)
    (reply,) = await _all(pool, VerifierTask(verifier="out", golds=("1",), response=way, prompt=target))
    assert (reply.status, reply.credit) == (Status.OK, 1.0), reply
    assert sorted(tmp_path.iterdir()) == [file]
    assert file.read_text() == "ours"
    if listener is not None:
        listener.close()
        await listener.wait_closed()


async def test_what_a_verifier_raises_when_it_is_loaded_is_told(tmp_path: Path) -> None:
    """The pool does not start, and the message names the verifier and the cause."""
    (tmp_path / "broken.py").write_text("raise ValueError('no licence')")
    verifiers = {"mine": f"{tmp_path}/broken.py:verify"}
    pool = WorkerPool(num_workers=1, memory_limit_bytes=2**28, recycle_after=10, verifiers=verifiers)
    try:
        with pytest.raises(WorkerDiedError, match=r"mine.*no licence"):
            await pool.start()
    finally:
        await pool.close()


_PROGRAM = """
import asyncio, sys
from services.reward.isolation.pool import WorkerPool
from services.reward.isolation.tasks import VerifierTask

async def main():
    verifiers = {"bad": sys.argv[1]}
    pool = WorkerPool(num_workers=2, memory_limit_bytes=2**28, recycle_after=100, verifiers=verifiers)
    await pool.start()
    sys.stdout.write(" ".join(map(str, pool.worker_pids)) + "\\n")
    sys.stdout.flush()
    await pool.run(VerifierTask(verifier="bad", golds=("1",), response="spin", prompt=""), 600.0)

asyncio.run(main())
"""


async def test_no_worker_outlives_a_killed_server() -> None:
    """kill -9 of the server ends the forkserver and all workers, the busy one too."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PROGRAM, _VERIFIERS["bad"]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    async with asyncio.timeout(HANG_S):
        workers = [int(pid) for pid in (await process.stdout.readline()).split()]
    forkserver = parent_of(workers[0])
    await until(lambda: any(psutil.Process(pid).cpu_times().user > 0.3 for pid in workers))  # one spins
    process.kill()
    await process.wait()
    await until(lambda: not any(map(is_alive, [*workers, forkserver])))
