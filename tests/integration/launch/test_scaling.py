"""`penstock scale` on a run of small programs: processes join and leave while it goes on."""

import asyncio
import dataclasses
import errno
import fcntl
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.config import dump, load
from penstock.errors import ConfigError, SetupError
from penstock.runtime.files import write_atomically
from penstock.runtime.ports import free_ports
from penstock.runtime.security import Security
from penstock.telemetry import log
from services.cli.app import main
from services.cli.own_folder import own_folder
from services.launch.launcher import run_processes
from services.launch.metrics import MetricsFollower, StepRow
from services.launch.process.spec import ProcessSpec, StopPhase
from services.launch.run_folder import RunFolder
from services.launch.run_plan import PlannedProcess, plan_processes
from services.launch.scaling import request
from services.launch.scaling.fleet import Fleet
from services.launch.scaling.request import ask
from services.launch.supervisor import Supervisor
from services.recipe import Recipe
from services.view.run_reader import RunReader
from tests.support.launch.fake_run import NOTE, SERVE
from tests.support.waiting import promptly, until, wait_until

SLOW = (
    NOTE
    + """
def stop(*_):
    while not os.path.exists("may-end"):
        time.sleep(0.02)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
note("up")
while True:
    time.sleep(0.05)  # no pause(): it would sleep on after a signal that came just before
"""
)


async def is_never_ready(_: str) -> bool:
    """Of a process that ends before it has begun."""
    return False


def spec_of(process: PlannedProcess, folder: Path, program: str) -> ProcessSpec:
    """A small program in place of a process."""
    head = f"import os; os.chdir({str(folder)!r}); NAME = {process.name!r}\n"
    return ProcessSpec(
        name=process.name,
        command=[sys.executable, "-c", head + program],
        environment=dict(os.environ),
        phase=process.phase,
        ends_run=process.ends_run,
    )


@asynccontextmanager
async def running(folder: RunFolder, program: str, *, joining: str = "") -> AsyncIterator[asyncio.Event]:
    """A run with one engine and one worker; yields the event that stops it.

    All processes run `program`; those that join later `joining`, if that is given.
    """
    recipe = load(Recipe, [])
    folder.write_config(recipe)
    folder.live_file.write_text(dump(recipe))
    processes = plan_processes(recipe, own_bus=False)

    def make_specs(wanted: Recipe, added: Sequence[PlannedProcess]) -> list[ProcessSpec]:
        if wanted.rollout.replicas > 3:
            raise ConfigError("no room")
        joins = [spec_of(process, folder.path, joining or program) for process in added]
        return [dataclasses.replace(spec, is_ready=is_never_ready) for spec in joins] if joining else joins

    fleet = Fleet(folder.live_file, processes, make_specs=make_specs)
    specs = [spec_of(process, folder.path, program) for process in processes]
    stop = asyncio.Event()
    with folder.locked():
        run = asyncio.create_task(run_processes(specs, folder, stop, Security(), grace_s=20.0, fleet=fleet))
        try:
            await until(lambda: num_noted(folder, "up") >= len(specs))
            yield stop
        finally:
            stop.set()
            await promptly(run)


def num_noted(folder: RunFolder, word: str) -> int:
    """How many processes noted this."""
    notes = folder.path / "notes"
    lines = notes.read_text().splitlines() if notes.exists() else []
    return sum(line.startswith(word) for line in lines)


async def asked(folder: RunFolder, **counts: int) -> list[str]:
    """The launcher's answer."""
    return await promptly(asyncio.to_thread(ask, folder, counts, timeout_s=30.0))


async def test_processes_join_and_leave_while_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that leave are asked to end and not started again; the others are left alone, and the run ends in order."""
    folder = RunFolder(tmp_path)
    async with running(folder, SERVE) as stop:
        before = num_noted(folder, "up")
        assert await asked(folder, rollout=3, worker=2) == ["starting rollout-1, rollout-2, worker-1"]
        await until(lambda: num_noted(folder, "up") == before + 3)
        assert await asked(folder, rollout=3) == ["the run has these numbers already"]
        assert await asked(folder, rollout=1) == ["ending rollout-1, rollout-2"]
        await until(lambda: num_noted(folder, "stopped-rollout-1") and num_noted(folder, "stopped-rollout-2"))
        assert num_noted(folder, "stopped-rollout-0") == num_noted(folder, "stopped-worker") == 0
        assert await asked(folder, worker=1) == ["ending worker-1"]
        await until(lambda: num_noted(folder, "stopped-worker-1"))
        shown: list[str] = []

        def have_left() -> bool:
            shown.append(capsys.readouterr().out)
            names = ("rollout-1", "rollout-2", "worker-1")
            return all(f"{name} has left the run" in "".join(shown) for name in names)

        await until(have_left)
        assert await asked(folder, rollout=2) == ["starting rollout-1"]
        await until(lambda: num_noted(folder, "up") == before + 4)
        assert num_noted(folder, "stopped-worker-0") == 0
        assert not stop.is_set()
    assert num_noted(folder, "stopped-rollout-0") == num_noted(folder, "stopped-worker-0") == 1
    assert num_noted(folder, "stopped-rollout-1") == 2
    assert num_noted(folder, "stopped-worker-1") == 1
    assert list((tmp_path / "scale").iterdir()) == []


async def test_a_process_that_cannot_join_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher says why, and the next request may try again."""
    folder = RunFolder(tmp_path)
    shown = ""

    async def until_it_has_left() -> None:
        nonlocal shown
        shown = ""

        def has_left() -> bool:
            nonlocal shown
            shown += capsys.readouterr().out
            return "rollout-1 has left the run" in shown

        await until(has_left)

    async with running(folder, SERVE, joining="raise SystemExit(2)") as stop:
        for _ in range(2):
            assert await asked(folder, rollout=2) == ["starting rollout-1"]
            await until_it_has_left()
            assert "rollout-1 cannot join the run, which goes on without it: rollout-1 cannot start; see" in shown
        assert await asked(folder, rollout=1) == ["the run has these numbers already"]
        assert num_noted(folder, "stopped-rollout-0") == 0
        assert not stop.is_set()


async def test_an_answer_that_cannot_be_written_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The change is made and shown; once the disk has room again, requests are answered."""
    folder = RunFolder(tmp_path)
    num_failed = 0

    def write(path: Path, text: str) -> None:
        nonlocal num_failed
        if ".answer." in path.name and not num_failed:
            num_failed += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(path, text)

    monkeypatch.setattr(request, "write_atomically", write)
    async with running(folder, SERVE):
        with monkeypatch.context() as patched:
            clock = SimpleNamespace(monotonic=lambda: 2.0 * num_failed, sleep=time.sleep)
            patched.setattr(request, "time", clock)  # it stands until the answer has failed
            with pytest.raises(SetupError, match="has not answered within 2 s"):
                await promptly(asyncio.to_thread(ask, folder, {"rollout": 2}, timeout_s=2.0))
        assert num_failed == 1
        assert "penstock scale: starting rollout-1" in capsys.readouterr().out
        assert await asked(folder, rollout=2) == ["the run has these numbers already"]


async def test_impossible_numbers_are_refused(tmp_path: Path) -> None:
    """By the settings' own rules, by the room there is, and while a process of that name is still ending."""
    folder = RunFolder(tmp_path)
    async with running(folder, SLOW):
        with pytest.raises(ConfigError, match="no room"):
            await asked(folder, rollout=4)
        with pytest.raises(ConfigError, match=r"worker\.num"):
            await asked(folder, worker=0)
        with pytest.raises(ConfigError, match="prefill = 1, but decode = 0"):
            await asked(folder, rollout=0, prefill=1)
        await asked(folder, rollout=2)
        await until(lambda: num_noted(folder, "up") == 6)
        await asked(folder, rollout=1)
        with pytest.raises(ConfigError, match="rollout-1 is still ending; try again in a moment"):
            await asked(folder, rollout=2)
        (tmp_path / "may-end").touch()


def test_a_run_that_is_over_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And so is a folder without a run."""
    assert main(["scale", str(tmp_path), "rollout=2"]) == 2
    assert "holds no run; give a run folder" in capsys.readouterr().err
    folder = RunFolder(tmp_path)
    folder.write_config(load(Recipe, []))
    with (tmp_path / ".trainer.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a trainer without a launcher, which answers nobody
        with pytest.raises(SetupError, match="no `penstock train` is running in"):
            ask(folder, {"rollout": 2}, timeout_s=1.0)
    assert main(["scale", str(tmp_path), "rollout=2"]) == 2
    assert "continue the run with --resume" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["penstock sft", "penstock eval"])
def test_only_a_training_run_is_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Nobody would answer in the folder of another command, which says at once whose it is."""
    monkeypatch.setattr(log, "configure", lambda *_, **__: None)  # its file is open until a process ends
    folder = RunFolder(tmp_path)

    def refused() -> None:
        with pytest.raises(
            SetupError, match=f"{tmp_path} is a folder of `{command}`, and only a run of `penstock train`"
        ):
            ask(folder, {"rollout": 2}, timeout_s=1.0)

    with own_folder(folder, load(Recipe, []), command=command, service="any", is_new=True):
        refused()
    refused()


async def test_a_request_waits_until_all_processes_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bus may take minutes to listen, on other hosts longest; meanwhile nothing is there that could leave."""
    num_looks, has_started_all = 0, Supervisor.has_started_all

    def look(supervisor: Supervisor) -> bool:
        nonlocal num_looks
        num_looks += 1
        return bool(has_started_all.__get__(supervisor))

    monkeypatch.setattr(Supervisor, "has_started_all", property(look))
    folder = RunFolder(tmp_path)
    recipe = load(Recipe, [], ["--rollout.replicas=2"])
    folder.write_config(recipe)
    folder.live_file.write_text(dump(recipe))
    processes = plan_processes(recipe, own_bus=False)
    (port,) = free_ports(1)
    bus = ProcessSpec(
        name="nats",
        command=[sys.executable, "-c", "import time; time.sleep(3600)"],
        environment=dict(os.environ),
        phase=StopPhase.BUS,
        address=f"127.0.0.1:{port}",
    )
    specs = [bus, *(spec_of(process, folder.path, SERVE) for process in processes)]
    fleet = Fleet(folder.live_file, processes, make_specs=lambda wanted, added: [])
    stop = asyncio.Event()

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO {}\r\n")
        writer.close()

    with folder.locked():
        run = asyncio.create_task(run_processes(specs, folder, stop, Security(), grace_s=20.0, fleet=fleet))
        asking = asyncio.create_task(asked(folder, rollout=1))
        await until(lambda: any(tmp_path.glob("scale/*.request.json")))
        last = num_looks + 2
        await until(lambda: num_looks >= last)
        assert any(tmp_path.glob("scale/*.request.json"))
        async with await asyncio.start_server(greet, "127.0.0.1", port):
            assert await promptly(asking) == ["ending rollout-1"]
            await until(lambda: num_noted(folder, "up") >= len(processes) - 1)  # one may be ended as it starts
        stop.set()
        await promptly(run)


async def test_a_request_that_comes_while_metrics_are_read_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher of a long run that goes on reads them for half a minute."""
    folder, poll, num_polls = RunFolder(tmp_path), MetricsFollower.poll, itertools.count()

    def poll_late(follower: MetricsFollower) -> list[StepRow]:
        if next(num_polls) == 0:
            wait_until(lambda: any(tmp_path.glob("scale/*.request.json")))
        return poll(follower)

    async def ask_at_once() -> list[str]:
        await until(lambda: RunReader(tmp_path).has_launcher)
        return await asked(folder, rollout=2)

    monkeypatch.setattr(MetricsFollower, "poll", poll_late)
    asking = asyncio.create_task(ask_at_once())
    async with running(folder, SERVE):
        assert await promptly(asking) == ["starting rollout-1"]
