"""The process that workers are forked from, where the machine has no room for another one."""

import os

import msgspec
import pytest

from penstock.runtime.isolation.forkserver_process import ForkedWorker, Forkserver


class NoSettings(msgspec.Struct):
    """The workers have none."""


async def answers(worker: ForkedWorker) -> bool:
    """Whether the worker is there."""
    worker.writer.write(b"hello")
    return await worker.reader.read(100) == b"hello"


def make_forkserver() -> Forkserver:
    """One that is not started."""
    return Forkserver(
        "tests.support.short_of_processes",
        NoSettings(),
        sandbox="off",
        environment={**os.environ, "PYTHONPATH": os.getcwd()},
    )


async def test_a_worker_that_fails_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    """Its traceback is on standard error; the server sees only that it is gone."""
    forkserver = make_forkserver()
    await forkserver.start()
    try:
        worker = await forkserver.spawn()
        worker.writer.write(b"fail")
        assert await worker.reader.read(100) == b""
        worker.writer.close()
    finally:
        await forkserver.stop()
    assert "ValueError: asked to fail" in capfd.readouterr().err


async def test_a_worker_that_cannot_be_forked_costs_no_other() -> None:
    """At a container's limit of processes, or without memory; the next attempt may succeed."""
    forkserver = make_forkserver()
    await forkserver.start()
    try:
        workers = [await forkserver.spawn(), await forkserver.spawn()]
        with pytest.raises(OSError, match="no worker can be forked: Resource temporarily unavailable"):
            await forkserver.spawn()
        workers.append(await forkserver.spawn())
        assert [await answers(worker) for worker in workers] == [True] * 3
    finally:
        for worker in workers:
            worker.writer.close()
        await forkserver.stop()
