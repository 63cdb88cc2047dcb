"""Processes and launchers that are killed leave nothing behind."""

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.errors import SetupError
from services.launch.process.backend import Backend, Ending
from services.launch.process.bounded_log import BoundedLog
from services.launch.process.child import Child
from services.launch.process.local import LocalBackend, LocalProcess, local_backend
from services.launch.process.spec import ProcessSpec, StopPhase
from services.launch.supervisor import ProcessFailedError, Supervisor, supervised
from services.view.trace_reader import TraceReader
from tests.support.launch.fake_run import (
    NOTE,
    PARENT,
    SERVE,
    STUBBORN,
    FakeRun,
    assert_all_gone,
)
from tests.support.processes import is_alive
from tests.support.waiting import promptly, until, wait_until

DEAF = """
import asyncio, os, sys
from pathlib import Path
from services.launch.process.bounded_log import BoundedLog
from services.launch.process.child import Child
from services.launch.process.local import LocalBackend
from services.launch.process.spec import ProcessSpec, StopPhase
from penstock.runtime.children.reaper import Reaper

async def main():
    command, environment = [sys.executable, "-c", sys.argv[1]], dict(os.environ)
    spec = ProcessSpec(name="rollout-0", command=command, environment=environment, phase=StopPhase.SERVE)
    child = Child(spec, log=BoundedLog(Path("log")), backend=LocalBackend(await Reaper.start()))
    start = asyncio.create_subprocess_exec
    async def start_and_hear_nothing(*command, **options):
        await start(*command, **options)
        await asyncio.Event().wait()
    asyncio.create_subprocess_exec = start_and_hear_nothing
    await child.run()

asyncio.run(main())
"""


def test_dead_process_is_started_again(fake_run: Callable[..., FakeRun]) -> None:
    """A process that is killed, and one that exits by itself, come back; the others are left alone. Each life of one is
    a span, with its end."""
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
    [spans] = TraceReader(run.folder).starts()
    lives = [span.attributes for span in spans if span.name == "process"]
    ends = {name: [each for each in lives if each["service"] == name] for name in ("router", "reward")}
    assert [[(life["start"], life["exit_code"]) for life in each] for each in sorted(ends.values(), key=len)] == [
        [(1, 0)],
        [(1, -signal.SIGKILL), (2, 0), (3, 0)],
    ]
    assert [life["was_stopped"] for life in max(ends.values(), key=len)] == [False, False, True]


def test_process_that_dies_again_and_again_ends_the_run(fake_run: Callable[..., FakeRun]) -> None:
    """More deaths than allowed end the run with exit code 1, the process's name and the end of its log."""
    program = NOTE + "note('up'); sys.exit('the boiler is cold')"
    run = fake_run([{"name": "router", "program": SERVE}, {"name": "reward", "program": program}], max_restarts=2)
    code, _, err = run.finish()
    assert code == 1
    assert err.startswith("error: reward exited with 1, death 3 in a row without a trained step")
    assert "the boiler is cold" in err
    assert "Traceback" not in err
    assert_all_gone(run)


@asynccontextmanager
async def dying(folder: Path, lines: list[str], *, backend: Backend | None = None) -> AsyncIterator[Supervisor]:
    """The supervisor of a process that dies at once; its third death in a row is one too many."""
    program = ProcessSpec(
        name="trainer",
        command=[sys.executable, "-c", "raise SystemExit(1)"],
        environment=os.environ,
        phase=StopPhase.WORK,
    )
    running = supervised(
        [program],
        logs=folder,
        report=lines.append,
        kill_after_s=5.0,
        max_restarts=2,
        first_backoff_s=0.001,
        backend=backend,
    )
    async with running as supervisor:
        yield supervisor


async def test_deaths_before_a_trained_step_no_longer_count(tmp_path: Path) -> None:
    """A run that makes progress survives any number of them; one that makes none ends at the next one too many."""
    lines: list[str] = []
    async with dying(tmp_path, lines) as supervisor:
        supervisor.start("trainer")
        for num_deaths in range(1, 6):
            await until(lambda wanted=num_deaths: len(lines) >= wanted)
            supervisor.note_progress()
        with pytest.raises(ProcessFailedError, match="death 3 in a row without a trained step"):
            await promptly(supervisor.wait(asyncio.Event()))


@pytest.mark.parametrize(("age_s", "recovers"), [(599.0, False), (601.0, True)])
async def test_how_long_a_process_ran_decides_whether_it_has_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, recovers: bool
) -> None:
    """Not how long all its lives took together: an engine that loads for minutes and then dies ends the run, too."""
    monkeypatch.setattr(Child, "age_s", property(lambda child: age_s))
    lines: list[str] = []
    async with dying(tmp_path, lines) as supervisor:
        supervisor.start("trainer")
        ending = asyncio.create_task(supervisor.wait(asyncio.Event()))
        await until(lambda: ending.done() or len(lines) > 4)
        assert ending.done() is not recovers
        if ending.done():
            assert isinstance(ending.exception(), ProcessFailedError)
        ending.cancel()


class Full:
    """This machine, which has room for no process at some of the starts."""

    def __init__(self, machine: LocalBackend, failing: set[int]) -> None:
        """Fail at these starts, the first of which is 1."""
        self.num_starts = 0
        self._machine = machine
        self._failing = failing

    async def start(self, spec: ProcessSpec, log: BoundedLog, stop: asyncio.Event) -> LocalProcess:
        """Start the process, or raise what fork(2) does."""
        self.num_starts += 1
        if self.num_starts in self._failing:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await self._machine.start(spec, log, stop)

    async def forget(self, spec: ProcessSpec) -> None:
        """Keep nothing."""


async def test_a_restart_that_fails_is_tried_again(tmp_path: Path) -> None:
    """A machine without room for a process at that moment counts as one death; the run goes on."""
    lines: list[str] = []
    async with local_backend() as machine:
        full = Full(machine, {2})
        async with dying(tmp_path, lines, backend=full) as supervisor:
            supervisor.start("trainer")
            with pytest.raises(ProcessFailedError, match="exited with 1, death 3 in a row without a trained step"):
                await promptly(supervisor.wait(asyncio.Event()))
    assert full.num_starts == 3
    assert [line.partition(";")[0] for line in lines] == [
        "trainer exited with 1",
        "trainer could not be started: Resource temporarily unavailable",
    ]


async def test_restarts_that_fail_again_and_again_end_the_run(tmp_path: Path) -> None:
    """The last reason is in the error."""
    async with local_backend() as machine, dying(tmp_path, [], backend=Full(machine, {2, 3, 4})) as supervisor:
        supervisor.start("trainer")
        with pytest.raises(
            ProcessFailedError, match=r"could not be started: Resource temporarily .*, death 3 in a row"
        ):
            await promptly(supervisor.wait(asyncio.Event()))


async def test_a_restart_that_fails_is_no_recovery(tmp_path: Path) -> None:
    """However long the process had run before: it has no age."""
    now_s = 0.0
    environment = dict(os.environ)
    spec = ProcessSpec(name="worker-0", command=["true"], environment=environment, phase=StopPhase.WORK)
    log = BoundedLog(tmp_path / "worker-0.log")
    async with local_backend() as machine:
        child = Child(spec, log=log, backend=Full(machine, {2}), clock=lambda: now_s)
        assert await child.run() == Ending(code=0)
        now_s = 601.0
        assert (await child.run()).code == 1
        assert (child.age_s, child.num_starts) == (0.0, 1)


async def test_a_first_start_that_fails_ends_the_run(tmp_path: Path) -> None:
    """What the machine never had room for is not waited for: a person is told, and what was started is ended."""
    specs = [
        ProcessSpec(name=name, command=["sleep", "600"], environment=dict(os.environ), phase=StopPhase.SERVE)
        for name in ("reward", "router")
    ]
    async with local_backend() as machine:
        full = Full(machine, {2})
        async with supervised(specs, logs=tmp_path, report=print, kill_after_s=5.0, backend=full) as supervisor:
            first = supervisor.start("reward")
            await until(lambda: first.is_running)
            supervisor.start("router")
            with pytest.raises(SetupError, match=r"router could not be started: Resource temporarily .*; end other"):
                await promptly(supervisor.wait(asyncio.Event()))
    assert full.num_starts == 2
    assert first.ending == Ending(code=-signal.SIGTERM)


async def test_a_machine_without_room_for_the_first_process_of_all_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end what a killed launcher leaves."""

    async def start(*_: str, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    with pytest.raises(SetupError, match="could not be started: Resource temporarily unavailable; end other processes"):
        async with local_backend():
            pass


def test_stubborn_process_is_killed_after_its_grace(fake_run: Callable[..., FakeRun]) -> None:
    """Processes that ignore SIGTERM are killed after their grace; what is stopped after them still ends in order."""
    specs = [{"name": f"rollout-{index}", "program": STUBBORN} for index in range(4)]
    run = fake_run([*specs, {"name": "nats", "program": SERVE, "phase": "BUS"}], kill_after_s=10.0)
    run.wait_for("up", 5)
    run.process.send_signal(signal.SIGINT)
    _, out, _ = run.finish()
    assert out.count("did not stop within 10 s; killed") == 4
    assert len(run.notes("stopped-nats")) == 1
    assert_all_gone(run)


def test_second_signal_kills_at_once(fake_run: Callable[..., FakeRun]) -> None:
    """A second Ctrl-C waits for nobody, not even the trainer."""
    deaf = NOTE + "signal.signal(signal.SIGTERM, lambda *_: note('asked'))\nnote('up')\nwhile True: time.sleep(0.05)"
    run = fake_run([{"name": "trainer", "program": deaf, "phase": "WORK", "ends_run": True}])
    run.wait_for("up")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("asked")
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    code, out, err = run.finish()
    assert code == 1
    assert "Traceback" not in err
    assert "after it was asked to stop" not in out + err
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
    wait_until(lambda: not is_alive(orphan))
    assert not is_alive(orphan)
    run.process.send_signal(signal.SIGINT)
    run.finish()
    assert_all_gone(run)


def test_a_restart_that_misses_what_was_there_before_is_tried_again(fake_run: Callable[..., FakeRun]) -> None:
    """As when a killed engine comes back while nats-server is frozen; an error of another kind still ends the run. Why
    a process ended is said where it wrote that."""
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
    for num in (2, 3):
        assert re.search(rf"reward exited with 2; starting it again in \S+ s: no answer from NATS, start {num}\n", out)
    assert re.search(r"reward was killed by signal 9; starting it again in \S+ s\n", out)
    assert_all_gone(run)
