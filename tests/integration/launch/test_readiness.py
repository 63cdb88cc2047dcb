"""When a process of a run counts as up, and what a run says of itself."""

import asyncio
import functools
import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from penstock.config import load
from penstock.errors import SetupError
from penstock.rpc.server import RpcServer, service_name
from penstock.runtime.children.reaper import Reaper
from penstock.runtime.ports import free_ports
from penstock.runtime.security import Security
from penstock.v1 import trainer_pb2, trainer_pb2_grpc
from services.launch import launcher
from services.launch.launcher import run_processes
from services.launch.metrics import MetricsFollower
from services.launch.process.backend import Ending
from services.launch.process.bounded_log import BoundedLog
from services.launch.process.child import Child, State
from services.launch.process.local import LocalBackend
from services.launch.process.readiness import serves_grpc, serves_nats
from services.launch.process.spec import ProcessSpec, StopPhase
from services.launch.run_folder import RunFolder
from services.launch.run_follower import RunFollower
from services.launch.run_status import describe_phase, fetch_run
from services.recipe import Recipe
from services.trainer.telemetry.progress import Progress, TrainerServicer
from tests.support.waiting import promptly, until


async def test_the_summary_counts_what_was_trained_while_stopping(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer finishes its step after the signal, so its last row is read after it has ended."""
    program = """
import json, signal, sys, time
def write(step):
    with open("metrics.jsonl", "a") as file:
        row = {"step": step, "num_steps": 9, "reward_mean": 0.5, "num_trained_groups": 32 * step}
        file.write(json.dumps(row) + "\\n")
def finish(*_):
    write(2)
    sys.exit(0)
signal.signal(signal.SIGTERM, finish)
write(1)
while True:
    time.sleep(0.05)
"""
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{program}"]
    trainer = ProcessSpec(
        name="trainer", command=command, environment=dict(os.environ), phase=StopPhase.WORK, ends_run=True
    )
    stop = asyncio.Event()
    running = asyncio.create_task(run_processes([trainer], folder, stop, Security.from_environment(), grace_s=0.0))
    await until(lambda: folder.metrics_file.exists() and folder.metrics_file.read_text())
    stop.set()
    await promptly(running)
    out = capsys.readouterr().out
    assert "groups  trained 64" in out
    assert "step 2/9" in out
    assert f"penstock train --resume {tmp_path}" in out


@pytest.mark.parametrize(("num_steps", "is_complete"), [(1, True), (2, False)])
async def test_a_signal_after_the_last_step_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_steps: int, is_complete: bool
) -> None:
    """The run is complete if the trainer had nothing left to do, and the result says so."""
    folder = RunFolder(tmp_path)
    folder.write_config(load(Recipe, [], [f"--trainer.num_steps={num_steps}"]))
    row = json.dumps({"step": 1, "num_steps": num_steps, "reward_mean": 0.5})
    program = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
open(sys.argv[1], "w").write(sys.argv[2])
while True:
    time.sleep(0.05)
"""
    trainer = ProcessSpec(
        name="trainer",
        command=[sys.executable, "-c", program, str(folder.metrics_file), f"{row}\n"],
        environment=dict(os.environ),
        phase=StopPhase.WORK,
        ends_run=True,
    )
    stop = asyncio.Event()
    running = asyncio.create_task(run_processes([trainer], folder, stop, Security.from_environment(), grace_s=0.0))
    await until(lambda: folder.metrics_file.exists() and folder.metrics_file.read_text())
    stop.set()
    assert await promptly(running) is is_complete
    out = capsys.readouterr().out
    assert ("the run is complete: nothing was left to stop" in out) is is_complete
    assert (f"penstock train --resume {tmp_path}" in out) is not is_complete


async def test_a_bus_that_ends_before_it_listens_ends_the_run(tmp_path: Path) -> None:
    """Nobody waits for it, and no restart helps where it cannot read its store: its last words are the error."""
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    (port,) = free_ports(1)
    program = "print('[INF] Starting nats-server'); print('[FTL] Cannot read the store'); raise SystemExit(1)"
    server = ProcessSpec(
        name="nats",
        command=[sys.executable, "-c", program],
        environment=dict(os.environ),
        phase=StopPhase.BUS,
        address=f"127.0.0.1:{port}",
    )
    worker = ProcessSpec(
        name="worker-0",
        command=["touch", str(tmp_path / "started")],
        environment=dict(os.environ),
        phase=StopPhase.WORK,
        ends_run=True,
    )
    said = rf"nats exited with 1 before it listened on 127\.0\.0\.1:{port}: \[FTL\] Cannot read the store; .*nats\.log"
    with pytest.raises(SetupError, match=said):
        await run_processes([server, worker], folder, asyncio.Event(), Security(), grace_s=0.0)
    assert not (tmp_path / "started").exists()


async def test_a_display_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    """The launcher's log says why nothing more is shown."""
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    row = '{"step": 1, "num_steps": 1, "loss": 0.0, "staleness_mean": "much"}\n'
    program = "import sys; open(sys.argv[1], 'w').write(sys.argv[2]); sys.stdin.read(); import signal; signal.pause()"
    trainer = ProcessSpec(
        name="trainer",
        command=[sys.executable, "-c", program, str(folder.metrics_file), row],
        environment=dict(os.environ),
        phase=StopPhase.WORK,
        ends_run=True,
    )
    stop = asyncio.Event()
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(run_processes([trainer], folder, stop, Security.from_environment(), grace_s=0.0))
        await until(lambda: [line for line in logs if line["event"] == "display.failed"])
        assert not running.done()
        stop.set()
        await promptly(running)


async def test_the_launcher_follows_what_the_trainer_writes(tmp_path: Path) -> None:
    """A trained step clears the deaths before it; an evaluation gets a line of its own."""
    nobody: list[Child] = []
    num_steps_noted = 0

    def note() -> None:
        nonlocal num_steps_noted
        num_steps_noted += 1

    supervisor: Any = SimpleNamespace(children=nobody, note_progress=note)
    lines: list[str] = []
    display: Any = SimpleNamespace(show=lambda *_: None, write=lines.append)
    file, evaluated = tmp_path / "metrics.jsonl", tmp_path / "evaluations.jsonl"
    follower = RunFollower(tmp_path, MetricsFollower(file), MetricsFollower(evaluated))
    async with launcher._watched(supervisor, follower, display, BoundedLog(tmp_path / "launcher.log")):
        assert num_steps_noted == 0
        file.write_text('{"step": 1, "num_steps": 9}\n')
        await until(lambda: num_steps_noted == 1)
        sets = {"a": {"score": {"value": 0.5, "standard_error": 0.125}}, "b": {"score": None}}
        evaluated.write_text(json.dumps({"step": 1, "elapsed_s": 2.5, "sets": sets}) + "\n")
        await until(lambda: lines == ["evaluation of step 1  a 0.500 ± 0.125  b not played  2.5 s"])


async def test_a_grpc_server_is_ready_when_its_health_says_so(tmp_path: Path) -> None:
    """A process counts as up when it answers grpc.health.v1, whatever it logs; each start has its own port."""
    program = """
import asyncio, sys
from penstock.rpc.server import RpcServer, service_name
from penstock.runtime.security import Security
async def main():
    server = RpcServer(host="127.0.0.1", port=int(sys.argv[1].partition("=")[2]))
    print("server.started", flush=True)
    while not __import__("os").path.exists("go"):
        await asyncio.sleep(0.02)
    await server.start()
    await asyncio.Event().wait()
asyncio.run(main())
"""
    spec = ProcessSpec(
        name="router",
        command=[sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{program}"],
        environment=dict(os.environ),
        phase=StopPhase.SERVE,
        address="127.0.0.1:0",
        port_key="router.port",
        is_ready=functools.partial(serves_grpc, security=Security()),
    )
    reaper = await Reaper.start()
    child = Child(spec, log=BoundedLog(tmp_path / "router.log"), backend=LocalBackend(reaper))
    assert not await child.check_ready()
    running = asyncio.create_task(child.run())
    await until(lambda: "server.started" in "".join(child.log.last_lines(1)))
    assert not await child.check_ready()
    assert child.state is State.STARTING
    with socket.socket() as other, pytest.raises(OSError, match="in use"):  # nobody takes the port meanwhile
        other.bind(("127.0.0.1", int(child.address.rpartition(":")[2])))
    (tmp_path / "go").touch()
    await until(child.check_ready)
    assert child.state is State.UP
    assert child.address.startswith("127.0.0.1:")
    assert not await child.check_ready()  # it is no news any more
    child.kill()
    assert await running == Ending(code=-signal.SIGKILL)
    first = child.address
    running = asyncio.create_task(child.run())
    await until(child.check_ready)
    assert child.address != first
    child.kill()
    await running
    await reaper.end()


async def test_the_trainer_is_asked_what_it_is_doing_with_what_it_wants_to_see() -> None:
    """A run with tokens is reported, too: GetRun wants one."""
    security = Security(token="t", nats_token="n", control_token="c")
    server = RpcServer(host="127.0.0.1", port=0, security=security)
    progress = Progress(run_id="r", num_steps=9, phase=trainer_pb2.RUN_PHASE_PUSHING)
    name = service_name(trainer_pb2.DESCRIPTOR, "TrainerService")
    server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, TrainerServicer(progress), name)
    await server.start()

    async def says_what_it_does() -> bool:
        run = await fetch_run(server.address, security)
        return run is not None and describe_phase(run) == "pushing weights to the engines"

    await until(says_what_it_does)
    assert await fetch_run(server.address, Security()) is None
    await server.drain(0.0)
    assert await fetch_run(server.address, security) is None


async def test_what_does_not_serve_is_not_ready(nats_url: str) -> None:
    """Not a server that drains, nor a port with nobody, nor another protocol; a nats-server is by its greeting."""
    server = RpcServer(host="127.0.0.1", port=0)
    await server.start()
    await until(lambda: serves_grpc(server.address, Security()))
    assert not await serves_nats(server.address)
    await server.set_serving(False)
    assert not await serves_grpc(server.address, Security())
    await server.drain(0.0)
    assert not await serves_grpc(server.address, Security())
    await until(lambda: serves_nats(nats_url.removeprefix("nats://")))
    assert not await serves_grpc(nats_url.removeprefix("nats://"), Security())
