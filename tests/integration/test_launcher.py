"""The launcher keeps processes going and leaves none, however the run ends. The processes here are small programs."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.rpc.server import RpcServer, service_name
from penstock.runtime.security import Security
from penstock.v1 import trainer_pb2, trainer_pb2_grpc
from services.launch.bounded_log import BoundedLog
from services.launch.child import Child, ProcessSpec, State, StopStage
from services.launch.config import LaunchConfig
from services.launch.launcher import run_processes
from services.launch.readiness import serves_grpc, serves_nats
from services.launch.reaper import Reaper
from services.launch.run_folder import RunFolder
from services.launch.run_status import describe_phase, fetch_run
from services.trainer.telemetry.progress import Progress, TrainerServicer
from tests.support.waiting import HANG_S, promptly, until

FAKE_RUN = Path(__file__).parents[1] / "support" / "fake_run.py"

NOTE = """
import os, signal, subprocess, sys, time
def note(word):
    with open("notes", "a") as file:
        file.write(f"{word} {os.getpid()}\\n")
"""
SERVE = (
    NOTE
    + """
note("up")
def stop(*_):
    note("stopped-" + NAME)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
while True:
    time.sleep(0.05)
"""
)
STUBBORN = (
    NOTE
    + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
note("up")
time.sleep(600)
"""
)
DEAF = """
import asyncio, os, sys
from pathlib import Path
from services.launch.bounded_log import BoundedLog
from services.launch.child import Child, ProcessSpec, StopStage
from services.launch.reaper import Reaper

async def main():
    command, environment = [sys.executable, "-c", sys.argv[1]], dict(os.environ)
    spec = ProcessSpec(name="rollout-0", command=command, environment=environment, stage=StopStage.SERVE)
    child = Child(spec, log=BoundedLog(Path("log")), reaper=await Reaper.start())
    start = asyncio.create_subprocess_exec
    async def start_and_hear_nothing(*command, **options):
        await start(*command, **options)
        await asyncio.Event().wait()
    asyncio.create_subprocess_exec = start_and_hear_nothing
    await child.run()

asyncio.run(main())
"""
PARENT = (
    NOTE
    + """
program = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", program])
with open("notes", "a") as file:
    file.write(f"grandchild {child.pid}\\n")
note("up")
time.sleep(600)
"""
)


class FakeRun:
    """A launcher in a process of its own, with its processes' notes."""

    def __init__(self, folder: Path, specs: list[dict[str, Any]], **config: Any) -> None:
        config = {"kill_after_s": 20.0, **config}
        for spec in specs:
            spec["program"] = f"NAME = {spec['name']!r}\n{spec['program']}"
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, FAKE_RUN, folder, json.dumps(specs), json.dumps(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def notes(self, word: str) -> list[int]:
        """Ids of the processes that noted `word`, in order."""
        lines = (self.folder / "notes").read_text().splitlines() if (self.folder / "notes").exists() else []
        return [int(line.split()[1]) for line in lines if line.split()[0] == word]

    def wait_for(self, word: str, count: int = 1) -> list[int]:
        """Wait until `count` processes noted `word`."""
        wait_until(lambda: len(self.notes(word)) >= count or self.process.poll() is not None)
        assert len(self.notes(word)) >= count, self.process.communicate()
        return self.notes(word)

    def finish(self, timeout_s: float = HANG_S) -> tuple[int, str, str]:
        """Wait for the end of the launcher: exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def all_pids(self) -> set[int]:
        """Every process that noted anything, and grandchildren."""
        return {int(line.split()[1]) for line in (self.folder / "notes").read_text().splitlines()}


@pytest.fixture
def fake_run(tmp_path: Path) -> Iterator[Callable[..., FakeRun]]:
    """Start a run; what a failing test leaves of it is killed."""
    runs: list[FakeRun] = []

    def start(specs: list[dict[str, Any]], **config: Any) -> FakeRun:
        runs.append(FakeRun(tmp_path, specs, **config))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()
        for stream in (run.process.stdout, run.process.stderr):
            if stream is not None:
                stream.close()


def wait_until(holds: Callable[[], bool], timeout_s: float = HANG_S) -> None:
    """Poll until `holds`; the caller says what is wrong if it does not."""
    deadline = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_all_gone(run: FakeRun) -> None:
    """No process of the run is alive, after the blink that the kernel takes."""
    pids = run.all_pids()
    wait_until(lambda: not any(map(is_alive, pids)))
    assert [pid for pid in pids if is_alive(pid)] == []


def test_end_of_the_trainer_is_the_end_of_the_run(fake_run: Callable[..., FakeRun]) -> None:
    """Exit 0 of the process that ends the run stops all others, and the launcher exits with 0."""
    trainer = NOTE + "while not os.path.exists('notes'): time.sleep(0.02)\nnote('trained')"
    run = fake_run(
        [
            {"name": "router", "program": SERVE},
            {"name": "trainer", "program": trainer, "stage": "WORK", "ends_run": True},
        ]
    )
    code, _, err = run.finish()
    assert (code, err) == (0, "")
    assert len(run.notes("stopped-router")) == 1
    assert_all_gone(run)


def test_dead_process_is_started_again(fake_run: Callable[..., FakeRun]) -> None:
    """A process that is killed, and one that exits by itself, come back; the others are left alone."""
    run = fake_run([{"name": "router", "program": SERVE}, {"name": "reward", "program": SERVE}])
    first, second = run.wait_for("up", 2)
    os.kill(first, signal.SIGKILL)
    third = run.wait_for("up", 3)[2]
    os.kill(third, signal.SIGTERM)  # exits with 0, which is a death too: nobody asked for it
    fourth = run.wait_for("up", 4)[3]
    assert is_alive(second)
    assert is_alive(fourth)
    run.process.send_signal(signal.SIGINT)
    _, out, _ = run.finish()
    assert "was killed by signal 9" in out
    assert "exited with 0" in out
    assert_all_gone(run)


def test_process_that_dies_again_and_again_ends_the_run(fake_run: Callable[..., FakeRun]) -> None:
    """More deaths than allowed end the run with exit code 1, the process's name and the end of its log."""
    program = NOTE + "note('up'); sys.exit('the boiler is cold')"
    run = fake_run([{"name": "router", "program": SERVE}, {"name": "reward", "program": program}], max_restarts=2)
    code, _, err = run.finish()
    assert code == 1
    assert err.startswith("error: reward exited with 1, death 3 within 600 s")
    assert "the boiler is cold" in err
    assert "Traceback" not in err
    assert_all_gone(run)


def test_user_error_of_a_process_is_the_run_s(fake_run: Callable[..., FakeRun]) -> None:
    """Exit code 2 is not answered by a restart: the launcher prints the error that the process wrote, and exits with 2.

    What it logged does not matter, even if it looks like an error."""
    program = (
        NOTE
        + """
note("up")
print("error: noise")
with open("reward.error.json", "w") as file:
    file.write('{"error": "SetupError", "message": "port 7 is in use"}')
sys.exit(2)
"""
    )
    run = fake_run([{"name": "router", "program": SERVE}, {"name": "reward", "program": program}])
    code, _, err = run.finish()
    assert (code, err) == (2, "error: port 7 is in use\n")
    assert len(run.notes("up")) <= 2
    assert_all_gone(run)


def test_a_restart_that_misses_what_was_there_before_is_tried_again(fake_run: Callable[..., FakeRun]) -> None:
    """As when a killed engine comes back while nats-server is frozen; an error of another kind still ends the run."""
    program = (
        NOTE
        + """
note("up")
with open("notes") as file:
    num_starts = sum(line.startswith("up") for line in file)
if num_starts == 1:
    os.kill(os.getpid(), signal.SIGKILL)
with open("reward.error.json", "w") as file:
    kind = "SetupError" if num_starts < 4 else "ConfigError"
    file.write('{"error": "%s", "message": "no answer from NATS, start %d"}' % (kind, num_starts))
sys.exit(2)
"""
    )
    run = fake_run([{"name": "reward", "program": program}])
    code, out, err = run.finish()
    assert (code, err) == (2, "error: no answer from NATS, start 4\n")
    assert out.count("reward exited with 2; starting it again") == 2
    assert_all_gone(run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_all_in_order(fake_run: Callable[..., FakeRun], number: signal.Signals) -> None:
    """Work is stopped first, then what serves it, the bus last; children of children are gone as well."""
    run = fake_run(
        [
            {"name": "nats", "program": SERVE, "stage": "BUS"},
            {"name": "router", "program": SERVE},
            {"name": "rollout-0", "program": PARENT},
            {"name": "worker", "program": SERVE, "stage": "WORK"},
        ]
    )
    run.wait_for("up", 4)
    run.process.send_signal(number)
    code, _, _ = run.finish()
    assert code == 0
    order = [line.split()[0] for line in (run.folder / "notes").read_text().splitlines() if line.startswith("stopped")]
    assert order == ["stopped-worker", "stopped-router", "stopped-nats"]
    assert_all_gone(run)


def test_stubborn_process_is_killed_after_its_grace(fake_run: Callable[..., FakeRun]) -> None:
    """Processes that ignore SIGTERM are killed after their grace; what is stopped after them still ends in order."""
    specs = [{"name": f"rollout-{index}", "program": STUBBORN} for index in range(4)]
    run = fake_run([*specs, {"name": "nats", "program": SERVE, "stage": "BUS"}], kill_after_s=0.5)
    run.wait_for("up", 5)
    run.process.send_signal(signal.SIGINT)
    _, out, _ = run.finish()
    assert out.count("did not stop within 0.5 s; killed") == 4
    assert len(run.notes("stopped-nats")) == 1
    assert_all_gone(run)


def test_the_trainer_finishes_its_step_however_long_it_takes(fake_run: Callable[..., FakeRun]) -> None:
    """After the first signal it has no limit, and what it needs for the push stays up, restarted if it dies."""
    trainer = (
        NOTE
        + """
def finish(*_):
    note("asked")
    while not os.path.exists("engine-is-back"):
        time.sleep(0.02)
    note("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, finish)
note("up")
while True:
    time.sleep(0.05)
"""
    )
    run = fake_run(
        [
            {"name": "rollout-0", "program": SERVE},
            {"name": "worker-0", "program": STUBBORN, "stage": "WORK"},
            {"name": "trainer", "program": trainer, "stage": "WORK", "ends_run": True},
        ],
        kill_after_s=0.5,
    )
    run.wait_for("up", 3)
    engine = next(pid for pid in run.notes("up") if "rollout-0" in Path(f"/proc/{pid}/cmdline").read_text())
    run.process.send_signal(signal.SIGINT)
    run.wait_for("asked")
    assert run.process.stdout is not None
    assert any("worker-0 did not stop within 0.5 s; killed" in line for line in run.process.stdout)
    os.kill(engine, signal.SIGKILL)
    run.wait_for("up", 4)
    (run.folder / "engine-is-back").touch()
    code, _, err = run.finish()
    assert (code, err) == (0, "")
    assert len(run.notes("saved")) == 1
    assert len(run.notes("stopped-rollout-0")) == 1
    assert_all_gone(run)


async def test_the_summary_counts_what_was_trained_while_stopping(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer finishes its step after the signal, so its last row is read after it has ended."""
    program = """
import json, signal, sys
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
    signal.pause()
"""
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{program}"]
    trainer = ProcessSpec(
        name="trainer", command=command, environment=dict(os.environ), stage=StopStage.WORK, ends_run=True
    )
    stop = asyncio.Event()
    running = asyncio.create_task(
        run_processes([trainer], folder, LaunchConfig(), stop, Security.from_environment(), grace_s=0.0)
    )
    await until(folder.metrics_file.exists)
    stop.set()
    await promptly(running)
    out = capsys.readouterr().out
    assert "groups  trained 64" in out
    assert "step 2/9" in out
    assert f"penstock train --resume {tmp_path}" in out


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
        stage=StopStage.SERVE,
        address="127.0.0.1:0",
        port_key="router.port",
        is_ready=serves_grpc,
    )
    reaper = await Reaper.start()
    child = Child(spec, log=BoundedLog(tmp_path / "router.log"), reaper=reaper)
    assert not await child.check_ready()
    running = asyncio.create_task(child.run())
    async with asyncio.timeout(HANG_S):
        while "server.started" not in "".join(child.log.last_lines(1)):
            await asyncio.sleep(0.02)
        assert not await child.check_ready()
        assert child.state is State.STARTING
        with socket.socket() as other, pytest.raises(OSError, match="in use"):  # nobody takes the port meanwhile
            other.bind(("127.0.0.1", int(child.address.rpartition(":")[2])))
        (tmp_path / "go").touch()
        while not await child.check_ready():
            await asyncio.sleep(0.02)
    assert child.state is State.UP
    assert child.address.startswith("127.0.0.1:")
    assert not await child.check_ready()  # it is no news any more
    child.kill()
    assert await running == -signal.SIGKILL
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
    run = await fetch_run(server.address, security)
    assert run is not None
    assert describe_phase(run) == "pushing weights to the engines"
    assert await fetch_run(server.address, Security()) is None
    await server.drain(0.0)
    assert await fetch_run(server.address, security) is None


async def test_what_does_not_serve_is_not_ready(nats_url: str) -> None:
    """Not a server that drains, nor a port with nobody, nor another protocol; a nats-server is by its greeting."""
    server = RpcServer(host="127.0.0.1", port=0)
    await server.start()
    assert await serves_grpc(server.address)
    assert not await serves_nats(server.address)
    await server.set_serving(False)
    assert not await serves_grpc(server.address)
    await server.drain(0.0)
    assert not await serves_grpc(server.address)
    assert await serves_nats(nats_url.removeprefix("nats://"))
    assert not await serves_grpc(nats_url.removeprefix("nats://"))


def test_second_signal_kills_at_once(fake_run: Callable[..., FakeRun]) -> None:
    """A second Ctrl-C waits for nobody, not even the trainer."""
    deaf = NOTE + "signal.signal(signal.SIGTERM, lambda *_: note('asked'))\nnote('up')\nwhile True: time.sleep(0.05)"
    run = fake_run([{"name": "trainer", "program": deaf, "stage": "WORK", "ends_run": True}])
    run.wait_for("up")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("asked")
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.finish()
    assert code == 1
    assert "Traceback" not in err
    assert_all_gone(run)


def test_killed_launcher_leaves_nothing(fake_run: Callable[..., FakeRun]) -> None:
    """kill -9 of the launcher ends its processes and theirs, even those that ignore SIGTERM."""
    run = fake_run([{"name": "rollout-0", "program": PARENT}, {"name": "rollout-1", "program": STUBBORN}])
    run.wait_for("up", 2)
    run.process.kill()
    run.finish()
    assert len(run.all_pids()) == 3
    assert_all_gone(run)


def test_launcher_killed_while_it_starts_a_process_leaves_nothing(tmp_path: Path) -> None:
    """A process that was started is ended with its children, even if the launcher never learned that it was."""
    launcher = subprocess.Popen([sys.executable, "-c", DEAF, PARENT], cwd=tmp_path, start_new_session=True)
    notes = tmp_path / "notes"
    wait_until(lambda: notes.exists() and "up" in notes.read_text())
    launcher.kill()
    launcher.wait()
    pids = [int(line.split()[1]) for line in notes.read_text().splitlines()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_alive, pids)))
    try:
        assert [pid for pid in pids if is_alive(pid)] == []
    finally:
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_killed_process_leaves_no_children_behind(fake_run: Callable[..., FakeRun]) -> None:
    """What a killed process had started is gone when it is started again."""
    run = fake_run([{"name": "rollout-0", "program": PARENT}])
    first = run.wait_for("up")[0]
    orphan = run.notes("grandchild")[0]
    os.kill(first, signal.SIGKILL)
    run.wait_for("up", 2)
    assert not is_alive(orphan)
    run.process.send_signal(signal.SIGINT)
    run.finish()
    assert_all_gone(run)
