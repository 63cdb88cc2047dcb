"""A node of a Slurm job waits for the run of the first node, serves it, and ends with it."""

import asyncio
import errno
import functools
import itertools
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock import config as configuration
from penstock.bus.local_server import local_server
from penstock.config import load
from penstock.runtime.ports import free_ports
from penstock.runtime.security import Security
from services.launch.process import readiness
from services.launch.process.bounded_log import BoundedLog
from services.launch.process.spec import ProcessSpec
from services.launch.run_folder import RunFolder
from services.launch.run_plan import RunPlan
from services.launch.slurm import node as slurm_node
from services.launch.slurm.node import find_run, serve_node
from services.launch.slurm.placement import NodeShare
from services.launch.supervisor import ProcessFailedError, supervised
from services.recipe import Recipe
from tests.support.waiting import promptly, until

NOTHING = NodeShare()


def node(folder: Path, stop: asyncio.Event, lines: list[str], share: NodeShare = NOTHING) -> "asyncio.Task[None]":
    (folder / "logs").mkdir(exist_ok=True)
    return asyncio.create_task(serve_node(RunFolder(folder), share, [], stop, Security(), lines.append))


def small_programs(
    program: str, is_ready: Callable[[str], Awaitable[bool]] | None = None
) -> Callable[..., list[ProcessSpec]]:
    """The same small program in place of every process of a node."""

    def specs(plan: RunPlan, *_: object) -> list[ProcessSpec]:
        return [
            ProcessSpec(
                name=process.name,
                command=[sys.executable, "-c", program],
                environment=dict(os.environ),
                phase=process.phase,
                is_ready=is_ready,
            )
            for process in plan.processes
        ]

    return specs


def write_addresses(folder: Path, bus_url: str) -> None:
    """As the launcher of the first node does."""
    (trainer,) = free_ports(1)
    live = load(Recipe, [], [f"--bus.url={bus_url}", f"--trainer.port={trainer}"])
    (folder / "live.toml").write_text(configuration.dump(live))


async def test_a_node_serves_from_the_first_answer_of_the_bus_to_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither without live.toml, nor by the addresses of an earlier start, whose NATS is gone."""
    lines: list[str] = []
    stop = asyncio.Event()
    num_looks = 0

    def look(folder: RunFolder) -> Path:
        nonlocal num_looks
        num_looks += 1
        return folder.path / "live.toml"

    async def has_looked() -> None:
        last = num_looks + 5  # what follows a look that finds something takes fewer
        await until(lambda: num_looks >= last)

    monkeypatch.setattr(RunFolder, "live_file", property(look))
    monkeypatch.setattr(slurm_node, "REFRESH_S", 0.02)
    serving = node(tmp_path, stop, lines)
    await has_looked()
    write_addresses(tmp_path, f"nats://127.0.0.1:{free_ports(1)[0]}")
    await has_looked()
    assert (serving.done(), lines) == (False, [])
    async with local_server(tmp_path / "nats") as url:
        write_addresses(tmp_path, url.removeprefix("nats://"))  # as a recipe may name it
        await until(lambda: lines == ["serving nothing"])
        await has_looked()
        assert not serving.done()
        (tmp_path / "live.toml").unlink()
        await promptly(serving)
        assert not stop.is_set(), "or a signal at the end would be the second one, which kills"


async def test_a_node_that_waits_ends_at_a_signal(tmp_path: Path) -> None:
    """The run may never have begun."""
    stop, lines = asyncio.Event(), list[str]()
    waiting = node(tmp_path, stop, lines)
    await asyncio.sleep(0)
    stop.set()
    await promptly(waiting)
    assert lines == []


async def test_a_node_says_that_the_bus_is_silent(tmp_path: Path) -> None:
    """Once: no signal tells it that the first node's name leads elsewhere, or that a firewall is in between."""
    lines: list[str] = []
    stop = asyncio.Event()
    url = f"nats://127.0.0.1:{free_ports(1)[0]}"
    times = iter([0.0, 29.0, 31.0, 90.0])

    def clock() -> float:
        now = next(times, None)
        if now is None:
            stop.set()
            return 99.0
        assert bool(lines) == (now > 31.0)
        return now

    write_addresses(tmp_path, url)
    assert await promptly(find_run(RunFolder(tmp_path), stop, lines.append, clock=clock)) is None
    (line,) = lines
    assert f"NATS at {url}, which has not answered for 30 s" in line


class Health(health_pb2_grpc.HealthServicer):
    """A trainer that is sometimes late."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.num_calls = 0

    async def Check(  # noqa: N802 - gRPC's name
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        self.num_calls += 1
        await asyncio.sleep(self.delay_s)
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


async def test_a_node_serves_a_trainer_that_is_late_with_an_answer(
    tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in its last push, which needs the node's engines; the node ends once it has ended."""
    server, health, stop, lines = grpc.aio.server(), Health(), asyncio.Event(), list[str]()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    live = load(Recipe, [], [f"--bus.url={nats_url}", f"--trainer.port={port}"])
    (tmp_path / "live.toml").write_text(configuration.dump(live))
    monkeypatch.setattr(readiness, "_TIMEOUT_S", 0.3)
    serving = node(tmp_path, stop, lines)
    await until(lambda: bool(lines))
    stop.set()
    await until(lambda: health.num_calls >= 1)
    health.delay_s = 1.0
    await until(lambda: health.num_calls >= 3)
    health.delay_s = 0.0
    await until(lambda: health.num_calls >= 5)
    assert not serving.done()
    monkeypatch.setattr(slurm_node, "_ABSENT_S", 0.5)
    await server.stop(None)
    await promptly(serving)


async def test_a_node_forgets_deaths_before_a_trained_step(
    tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes may die any number of times while the trainer, which runs elsewhere, makes progress."""
    often = functools.partial(supervised, max_restarts=1, first_backoff_s=0.3)
    monkeypatch.setattr(slurm_node, "supervised", often)
    monkeypatch.setattr(slurm_node, "process_specs", small_programs("raise SystemExit(1)"))
    monkeypatch.setattr(slurm_node, "REFRESH_S", 0.02)
    metrics = tmp_path / "metrics.jsonl"

    async def train() -> None:
        for step in itertools.count(1):
            with metrics.open("a") as file:
                file.write(f'{{"step": {step}, "num_steps": 9}}\n')
            await asyncio.sleep(0.01)

    lines: list[str] = []
    write_addresses(tmp_path, nats_url)
    training = asyncio.create_task(train())
    serving = node(tmp_path, asyncio.Event(), lines, NodeShare(workers=1))
    await until(lambda: serving.done() or sum("starting it again" in line for line in lines) >= 3)
    assert not serving.done()
    training.cancel()
    with pytest.raises(ProcessFailedError, match="death 2 in a row without a trained step"):
        await promptly(serving)


async def test_a_node_looks_after_its_processes_although_a_folder_failed_once(
    tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network folder that is stale for a moment costs one look, not all that follow."""
    size, has_failed = BoundedLog._size, asyncio.Event()

    def stale_once(log: BoundedLog) -> int:
        if log.path == tmp_path / "logs" / "127.0.0.1.log" and not has_failed.is_set():
            has_failed.set()
            raise OSError(errno.ESTALE, "Stale file handle")
        return size(log)

    async def is_ready(_: str) -> bool:
        return has_failed.is_set()

    monkeypatch.setattr(BoundedLog, "_size", stale_once)
    monkeypatch.setattr(slurm_node, "process_specs", small_programs("import signal; signal.pause()", is_ready))
    lines: list[str] = []
    write_addresses(tmp_path, nats_url)
    serving = node(tmp_path, asyncio.Event(), lines, NodeShare(workers=1))
    await until(lambda: any("worker-0 is up after" in line for line in lines))
    (tmp_path / "live.toml").unlink()
    await promptly(serving)
