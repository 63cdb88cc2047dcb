"""Environments of plain functions run in processes of their own, and whatever they do costs their episode only."""

import asyncio
import dataclasses
import errno
import os
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.environments import AssistantTurn
from penstock.errors import ConfigError, EnvironmentFailedError, UnavailableError
from penstock.records import TextPart, ToolCall, Verdict
from penstock.runtime.process import end_task
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.hosting import processes
from services.rollout.worker.environments.hosting.hosted import HostedEnvironment
from services.rollout.worker.environments.registry import EnvironmentRegistry
from tests.support.processes import open_files_left
from tests.support.waiting import HANG_S, promptly, settled, until
from tests.support.worker.hosted_episodes import HERE, environment_of, has_ended, pid_of, play_on, text_of, turn


async def test_an_episode_is_played_in_another_process() -> None:
    """Task, images, turns, calls, rewards, metrics and the time left go over and come back."""
    async with environment_of("Echo", args={"greeting": "good day"}) as (environment, task):
        first = await environment.reset(task)
        assert isinstance(environment, HostedEnvironment)
        assert first.images == task.images
        question, greeting = first.messages
        assert question == task.messages[0]
        [hello] = greeting.parts
        assert isinstance(hello, TextPart)
        pid = pid_of(first)
        assert hello.text == f"good day pid={pid} {{'level': [1, None]}}"
        assert pid != os.getpid()
        called = AssistantTurn(text="call", calls=(ToolCall(name="zoom", arguments={"box": [0, 0.5]}),))
        assert text_of(await environment.step(called)) == "call [{'box': [0, 0.5]}]"
        assert 50 < float(text_of(await environment.step(turn("time")))) <= 60
        last = await environment.step(turn("stop"))
        assert (last.observation, last.reward, last.metrics) == (None, 3.0, {"heard": 3.0})
    await until(lambda: has_ended(pid))


@pytest.mark.parametrize("kind", ["Echo", "AsyncEcho"])
async def test_a_hosted_environment_asks_for_verdicts_over_its_pipe(kind: str) -> None:
    """Blocking or awaited; it needs no address of the reward service."""
    async with environment_of(kind, isolated=True) as (environment, task):
        await environment.reset(task)
        prefix = "grade " if kind == "Echo" else ""
        assert text_of(await environment.step(turn(f"{prefix}3"))) == "OK 1.0"
        assert text_of(await environment.step(turn(f"{prefix}4"))) == "OK 0.0"
        with pytest.raises(EnvironmentFailedError, match="step raised PenstockError: no reward service answers"):
            await environment.step(turn(f"{prefix}fail"))


async def test_an_environment_may_stop_waiting_for_a_verdict(tmp_path: Path) -> None:
    """It plays on, as in the event loop, and a later question gets its own verdict."""
    async with environment_of("GivesUp", isolated=True, args={"folder": str(tmp_path)}) as (environment, _):
        assert await play_on(environment, tmp_path) == ["played on", "3 1.0", "played on"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Exits", r"ended with exit code 7 during step; it wrote last: giving up"),
        ("Segfaults", r"(?s)was ended by SIGSEGV during step; it wrote last: .*hosted_environments\.py"),
        ("LeavesBySystemExit", r"step raised SystemExit: 3"),
        ("Raises", r"step raised KeyError: 'board' \(hosted_environments\.py, line \d+\)"),
        ("NotANumber", r"reward = nan must be a finite number"),
        ("Forgetful", r"step: it answered NoneType; it must answer a penstock\.environments\.StepResult"),
        ("LongWinded", r"text of an observation has 10000000 characters; at most 2097152"),
        ("HugePicture", r"images of an observation have 209715200 bytes; at most 33554432"),
    ],
)
async def test_a_failing_environment_ends_its_episode_with_a_reason(kind: str, reason: str) -> None:
    """The reason says how its process ended, where it raised, or which bound it broke."""
    async with environment_of(kind) as (environment, task):
        pid = pid_of(await environment.reset(task))
        with pytest.raises(EnvironmentFailedError, match=reason):
            await environment.step(turn("go"))
    await until(lambda: has_ended(pid))


@pytest.mark.parametrize("kind", ["StuckInStep", "StuckInReset"])
async def test_a_stuck_environment_is_killed_and_holds_up_nobody(kind: str) -> None:
    """It holds its interpreter's lock; the worker's loop goes on, and the process is gone after close."""
    is_stuck = asyncio.Event()

    async def grade(text: str) -> Verdict:
        is_stuck.set()
        return Verdict(score=0.0, status="OK", extracted=text, method="EXACT")

    with capture_logs() as logs:
        async with environment_of(kind) as (environment, task):
            task = dataclasses.replace(task, grade=grade)
            call = asyncio.create_task(environment.reset(task))
            if kind == "StuckInStep":
                await call
                call = asyncio.create_task(environment.step(turn("go")))
            await promptly(is_stuck.wait())
            await settled()
            [pid] = _episode_pids()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
    await until(lambda: has_ended(pid))
    [killed] = [event for event in logs if event["event"] == "environment.killed"]
    assert killed["reason"].endswith("was not finished when the episode ended")


async def test_an_environment_that_is_stuck_in_close_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its episode is over, and what it holds is released by the kernel."""
    monkeypatch.setattr("services.rollout.worker.environments.hosting.processes._CLOSE_TIMEOUT_S", 0.2)
    with capture_logs() as logs:
        async with environment_of("StuckInClose") as (environment, task):
            pid = pid_of(await environment.reset(task))
    await until(lambda: has_ended(pid))
    [killed] = [event for event in logs if event["event"] == "environment.killed"]
    assert killed["reason"] == "its close took longer than 0.2 s"


async def test_an_environment_may_print_as_much_as_it_likes() -> None:
    """What it prints neither blocks it nor reaches the worker."""
    async with environment_of("Chatty") as (environment, task):
        await environment.reset(task)
        assert text_of(await environment.step(turn("go"))) == "done"


@pytest.mark.parametrize("how", ["close stdout", "close stderr", "unset stdout,stderr"])
async def test_an_environment_that_drops_its_output_costs_no_other_episode(how: str) -> None:
    """Its calls are answered, however often; and at its end there is nothing to flush."""
    async with environment_of("DropsOutput") as (environment, task):
        pid = pid_of(await environment.reset(task))
        factory = environment._open_channel.__self__
        another = factory()
        other_pid = pid_of(await another.reset(task))
        assert text_of(await another.step(turn(how))) == "done"
        with pytest.raises(EnvironmentFailedError, match="ended with exit code 1 during step"):
            await another.step(turn(f"{how} then interrupt"))
        await another.close()
        await until(lambda: has_ended(other_pid))
        assert not has_ended(pid)
        assert text_of(await environment.step(turn(how))) == "done"


async def test_an_environment_is_closed_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its close runs, also after one of its calls raised."""
    monkeypatch.setattr("services.rollout.worker.environments.hosting.processes._CLOSE_TIMEOUT_S", HANG_S)
    async with environment_of("Remembers", args={"path": str(tmp_path / "closed")}) as (environment, task):
        await environment.reset(task)
    assert (tmp_path / "closed").read_text() == "closed"


async def test_what_an_environment_started_ends_with_it() -> None:
    """Also a program that it forgot."""
    async with environment_of("StartsProcesses") as (environment, task):
        await environment.reset(task)
        stray = int(text_of(await environment.step(turn("go"))))
        assert not has_ended(stray)
        with pytest.raises(EnvironmentFailedError, match="ended with exit code 0 during step"):
            await environment.step(turn("exit"))
    await until(lambda: has_ended(stray))


async def test_what_an_environment_started_can_be_interrupted() -> None:
    """As recorders and simulators are that then write their files."""
    async with environment_of("StartsProcesses") as (environment, task):
        await environment.reset(task)
        assert int(text_of(await environment.step(turn("interrupt")))) == -signal.SIGINT


async def test_an_environments_process_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the worker's other variables."""
    monkeypatch.setenv("PENSTOCK_ENVIRONMENT_TOKEN", "b2f5ff47436671b6")
    monkeypatch.setenv("MAZE_SIZE", "fourty")
    async with environment_of("Curious") as (environment, task):
        await environment.reset(task)
        seen = text_of(await environment.step(turn("go")))
    assert "b2f5ff47436671b6" not in seen
    assert seen.count("fourty") == 2


async def test_a_dead_server_is_started_again_for_the_next_episode() -> None:
    """An episode that ran loses its process with a reason; the next one is played."""
    async with environment_of("Echo") as (environment, task):
        pid = pid_of(await environment.reset(task))
        factory = environment._open_channel.__self__
        os.kill(factory._forkserver._process.pid, signal.SIGKILL)
        await until(lambda: has_ended(pid))
        with pytest.raises(EnvironmentFailedError, match="its process"):
            await environment.step(turn("go"))
        another = factory()
        assert "hello" in text_of(await another.reset(task))
        await another.close()


async def test_many_episodes_run_at_once() -> None:
    """Each in a process of its own."""
    async with environment_of("Echo") as (environment, task):
        factory = environment._open_channel.__self__
        environments = [factory() for _ in range(24)]
        firsts = await asyncio.gather(*(each.reset(task) for each in environments))
        assert len(set(map(pid_of, firsts))) == 24
        await asyncio.gather(*(each.close() for each in environments))


async def test_a_process_that_cannot_be_started_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of a descriptor. Later ones would get each other's processes, and kill them when they end."""
    with socket.socket() as channel:

        def dup() -> socket.socket:
            raise OSError(errno.EMFILE, "Too many open files")

        no_room: Any = SimpleNamespace(dup=dup)
        server, sent = processes._Forkserver(), list[object]()
        monkeypatch.setattr(server, "_send", lambda message, descriptor: (sent.append(message), descriptor.close()))
        with pytest.raises(UnavailableError, match="no process can be started: Too many open files"):
            await server.spawn(no_room)
        spawning = asyncio.create_task(server.spawn(channel))
        await until(lambda: len(sent) == 1)
        assert len(server._spawning) == 1
        await end_task(spawning)


@pytest.mark.parametrize("num_left", range(4))
async def test_a_server_without_descriptors_keeps_the_episodes_that_run(num_left: int) -> None:
    """A new one needs four: too few, however many that are, end no other episode; later there is room again."""
    async with environment_of("Echo") as (environment, task):
        await environment.reset(task)
        factory = environment._open_channel.__self__
        server = factory._forkserver._process.pid
        another = factory()
        with (
            open_files_left(server, num_left),
            pytest.raises(UnavailableError, match="no process can be forked: Too many open files"),
        ):
            await another.reset(task)
        assert "hello" in text_of(await another.reset(task))
        await another.close()
        assert text_of(await environment.step(turn("hi")))


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (
            {"class": f"{HERE}:Echo", "args": {"greetings": 1}},
            r"environment mine: args = .*greetings.* do not fit",
        ),
        ({"class": f"{HERE}:Remembers"}, r"environment mine: .*missing a required argument: 'path'"),
        ({"class": f"{HERE}:HalfAsync"}, r"environment mine: HalfAsync has async reset and step and plain close"),
        ({"class": f"{HERE}:Echoes"}, r'environment mine: ".*:Echoes" cannot be loaded'),
        (
            {"args": {"greeting": "x"}},
            r"environment mine: there is no built-in environment of this name",
        ),
    ],
)
@pytest.mark.parametrize("isolated", [False, True])
async def test_a_wrong_table_is_reported_when_the_worker_starts(
    table: dict[str, Any], reason: str, isolated: bool
) -> None:
    """With the environment's name, whether it is imported here or in its own process."""
    tables = WorkerConfig(environments={"mine": table | {"isolated": isolated}}).environments
    with pytest.raises(ConfigError, match=reason):
        async with EnvironmentRegistry(tables):
            raise AssertionError


_WORKER = """
import asyncio, sys
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.registry import EnvironmentRegistry
from tests.support.worker.hosted_episodes import HERE, make_task, pid_of, text_of, turn
async def main():
    paths = {"mine": f"{HERE}:StuckInStep", "starts": f"{HERE}:StartsProcesses"}
    async with EnvironmentRegistry(WorkerConfig(environments=paths).environments) as registry:
        stuck, starts = registry.find("mine")(), registry.find("starts")()
        pids = [pid_of(await each.reset(make_task())) for each in (stuck, starts)]
        pids.append(text_of(await starts.step(turn("go"))))
        print(*pids, flush=True)
        await stuck.step(turn("go"))
asyncio.run(main())
"""


async def test_no_process_outlives_a_killed_worker() -> None:
    """Nor does what an environment started: not even kill -9 of the worker leaves one."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _WORKER, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert worker.stdout is not None
    pids = [int(pid) for pid in (await worker.stdout.readline()).split()]
    assert len(pids) == 3
    assert not any(map(has_ended, pids))
    worker.kill()
    await worker.wait()
    await until(lambda: all(map(has_ended, pids)))


def _episode_pids() -> list[int]:
    """Processes that this one's forkservers forked."""
    return [
        pid
        for server in _children(os.getpid())
        if b"hosting.forkserver" in Path(f"/proc/{server}/cmdline").read_bytes()
        for pid in _children(server)
    ]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
