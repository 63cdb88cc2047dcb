"""The launcher keeps processes going and leaves none, however the run ends. The processes here are small programs."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.launch.child import Child, ProcessSpec, Reaper, State, StopStage

FAKE_RUN = Path(__file__).with_name("fake_run.py")

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
from services.launch.child import Child, ProcessSpec, Reaper, StopStage

async def main():
    command, environment = [sys.executable, "-c", sys.argv[1]], dict(os.environ)
    spec = ProcessSpec(name="rollout-0", command=command, environment=environment, stage=StopStage.SERVE)
    child = Child(spec, log_file=Path("log"), reaper=await Reaper.start())
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
        config = {"restart_backoff_s": 0.05, "stop_grace_s": 2.0, **config}
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

    def finish(self, timeout_s: float = 20.0) -> tuple[int, str, str]:
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


def wait_until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Poll until `holds`, at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_all_gone(run: FakeRun) -> None:
    """No process of the run is alive, after the blink that the kernel takes."""
    pids = run.all_pids()
    wait_until(lambda: not any(map(is_alive, pids)), timeout_s=3.0)
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
    """Exit code 2 is not answered by a restart: the launcher prints the process's line and exits with 2."""
    program = NOTE + "note('up'); print('INFO noise'); sys.stderr.write('error: port 7 is in use\\n'); sys.exit(2)"
    run = fake_run([{"name": "router", "program": SERVE}, {"name": "reward", "program": program}])
    code, _, err = run.finish()
    assert (code, err) == (2, "error: port 7 is in use\n")
    assert len(run.notes("up")) <= 2
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
    """Processes that ignore SIGTERM cost the grace once, not each; what is stopped after them still gets its part."""
    specs = [{"name": f"rollout-{index}", "program": STUBBORN} for index in range(4)]
    run = fake_run([*specs, {"name": "nats", "program": SERVE, "stage": "BUS"}], stop_grace_s=2.0)
    run.wait_for("up", 5)
    started = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    _, out, _ = run.finish()
    assert 1.6 <= time.monotonic() - started < 4.0
    assert out.count("did not stop within 1.6 s; killed") == 4
    assert len(run.notes("stopped-nats")) == 1
    assert_all_gone(run)


async def test_log_of_an_earlier_launch_is_no_sign_of_life(tmp_path: Path) -> None:
    """A process counts as up when it has said so since it was last started."""
    log_file = tmp_path / "router.log"
    log_file.write_text("server.started\n")
    program = (
        "import sys, time; time.sleep(0.3); sys.stderr.write('server.started\\n'); sys.stderr.flush(); time.sleep(60)"
    )
    spec = ProcessSpec(
        name="router", command=[sys.executable, "-c", program], environment=dict(os.environ), stage=StopStage.SERVE
    )
    reaper = await Reaper.start()
    child = Child(spec, log_file=log_file, reaper=reaper)
    assert not child.look()
    running = asyncio.create_task(child.run())
    while child.pid is None:
        await asyncio.sleep(0.01)
    assert not child.look()
    deadline = time.monotonic() + 10.0
    while not child.look() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert child.state is State.UP
    child.kill()
    assert await running == -signal.SIGKILL
    await reaper.end()


def test_second_signal_kills_at_once(fake_run: Callable[..., FakeRun]) -> None:
    """A second Ctrl-C does not wait for the grace."""
    run = fake_run([{"name": "rollout-0", "program": STUBBORN}], stop_grace_s=60.0)
    run.wait_for("up")
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.finish(timeout_s=5.0)
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
    wait_until(lambda: not any(map(is_alive, pids)), timeout_s=3.0)
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
