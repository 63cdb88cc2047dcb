"""The process that workers are forked from, where workers fail, start programs, or find no room on the machine."""

import asyncio
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import psutil
import pytest

from penstock.runtime.isolation.forkserver_process import ForkedWorker, Forkserver
from tests.support.processes import is_alive
from tests.support.waiting import promptly, until


class NoSettings(msgspec.Struct):
    """The workers have none."""


async def answers(worker: ForkedWorker) -> bool:
    """Whether the worker is there."""
    worker.writer.write(b"hello")
    return await worker.reader.read(100) == b"hello"


def made() -> Forkserver:
    """A forkserver that is not started."""
    return Forkserver(
        "tests.support.short_of_processes",
        NoSettings(),
        sandbox="off",
        environment={**os.environ, "PYTHONPATH": os.getcwd()},
    )


@asynccontextmanager
async def running() -> AsyncIterator[Forkserver]:
    """A forkserver during the context."""
    forkserver = made()
    await forkserver.start()
    try:
        yield forkserver
    finally:
        await forkserver.stop()


async def test_a_worker_that_fails_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    """Its traceback is on standard error; the server sees only that it is gone."""
    async with running() as forkserver:
        worker = await forkserver.spawn()
        worker.writer.write(b"fail")
        assert await worker.reader.read(100) == b""
        worker.writer.close()
    assert "ValueError: asked to fail" in capfd.readouterr().err


@pytest.mark.parametrize("end", ["worker", "pool", "forkserver"])
async def test_what_a_worker_started_ends_with_it(end: str) -> None:
    """However it ends: killed for its item, with the pool, or with the forkserver."""
    async with running() as forkserver:
        worker = await forkserver.spawn()
        worker.writer.write(b"start")
        program = int(await worker.reader.read(100))
        assert is_alive(program)
        if end == "worker":
            forkserver.kill_worker(worker.pid)
            await until(lambda: not is_alive(program))
        if end == "forkserver":
            os.kill(psutil.Process(worker.pid).ppid(), signal.SIGKILL)
        worker.writer.close()
    await until(lambda: not is_alive(program))


_SERVER = """
import asyncio
from tests.integration.reward.test_forkserver import running

async def main():
    async with running() as forkserver:
        worker = await forkserver.spawn()
        worker.writer.write(b"start")
        print(int(await worker.reader.read(100)), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_what_a_worker_started_ends_with_a_killed_server() -> None:
    """Not even kill -9 of the server leaves it."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _SERVER), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert server.stdout is not None
    program = int(await promptly(server.stdout.readline()))
    assert is_alive(program)
    server.kill()
    await server.wait()
    await until(lambda: not is_alive(program))


async def test_a_worker_that_cannot_be_forked_costs_no_other() -> None:
    """At a container's limit of processes, or without memory; the next attempt may succeed."""
    async with running() as forkserver:
        workers = [await forkserver.spawn(), await forkserver.spawn()]
        with pytest.raises(OSError, match=r"no worker can be forked: Resource temporarily unavailable; .*ulimit -u"):
            await forkserver.spawn()
        workers.append(await forkserver.spawn())
        assert [await answers(worker) for worker in workers] == [True] * 3
        for worker in workers:
            worker.writer.close()


@pytest.mark.parametrize(
    "refusal", [BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), RuntimeError("can't start new thread")]
)
async def test_a_forkserver_without_process_or_thread_says_what_to_raise(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    """Its owner logs that and tries again, as it does where a worker cannot be forked; the next attempt may succeed."""

    async def refuse(*_: object, **__: object) -> None:
        raise refusal

    forkserver = made()
    with monkeypatch.context() as at_the_limit:
        at_the_limit.setattr(asyncio, "create_subprocess_exec", refuse)
        with pytest.raises(OSError, match=r"(can't start new thread|temporarily unavailable); .*ulimit -u"):
            await forkserver.start()
    await forkserver.start()
    await forkserver.stop()
