"""How many processes a run shall have, which GPUs further ones get, and what becomes of those that fail."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.config import dump, load
from penstock.errors import ConfigError, UserError
from penstock.runtime.security import Security
from services.launch.gpu_plan import GpuPlan, extend_plan, plan_gpus, without
from services.launch.launcher import local_fleet
from services.launch.process.child import Child
from services.launch.process.spec import ProcessSpec, StopPhase
from services.launch.run_folder import RunFolder
from services.launch.run_plan import make_plan
from services.launch.scaling.fleet import Fleet, parse_counts
from services.launch.supervisor import Supervisor, supervised
from services.recipe import Recipe
from tests.support.waiting import promptly, until


def test_counts_are_read_by_kind() -> None:
    """Mistakes are named."""
    assert parse_counts(["rollout=6", "worker=2"]) == {"rollout": 6, "worker": 2}
    for wrong, words in (
        (["engine=2"], "'engine' cannot be scaled; write KIND=N with one of rollout, prefill, decode, worker"),
        (["rollout"], "'rollout' has no number of processes; write rollout=N"),
        (["rollout=-1"], "'rollout=-1' has no number"),
        ([], "no kind of process is named"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_counts(wrong)


def planned(num_devices: int, engines: list[str]) -> GpuPlan:
    """The plan of these engines and a trainer of one rank."""
    devices = [str(index) for index in range(num_devices)]
    return plan_gpus(devices, engines, tensor_parallel=1, trainer_ranks=1, memory_fraction=0.5)


def test_further_engines_get_gpus_that_nobody_has() -> None:
    """Those that were there keep theirs; what an engine leaves is free again."""
    plan = extend_plan(planned(4, ["rollout-0"]), ["rollout-1"], tensor_parallel=1)
    assert plan.of_process == {"rollout-0": ("0",), "trainer": ("1",), "rollout-1": ("2",)}
    plan = extend_plan(without(plan, "rollout-0"), ["rollout-2", "rollout-3"], tensor_parallel=1)
    assert plan.of_process == {"trainer": ("1",), "rollout-1": ("2",), "rollout-2": ("0",), "rollout-3": ("3",)}


def test_engines_for_which_there_is_no_gpu_are_refused() -> None:
    """With the number that fits; a GPU that all share was divided at the start, and CPUs have room for any."""
    with pytest.raises(ConfigError, match=r"3 more engines .* need 3 GPUs, and 2 of 4 are free; add at most 2"):
        extend_plan(planned(4, ["rollout-0"]), ["a", "b", "c"], tensor_parallel=1)
    with pytest.raises(ConfigError, match="GPU 0 is the only one, and its memory was divided at the start"):
        extend_plan(planned(1, ["rollout-0"]), ["rollout-1"], tensor_parallel=1)
    on_cpu = planned(0, ["rollout-0"])
    assert extend_plan(on_cpu, ["rollout-1"], tensor_parallel=1) == on_cpu


@asynccontextmanager
async def launched(folder: Path, num_devices: int) -> AsyncIterator[tuple[Fleet, Supervisor]]:
    """Two engines, two workers and a trainer on these GPUs, as programs that do nothing."""
    recipe = load(Recipe, [], ["--rollout.replicas=2", "--rollout.gpu_memory_fraction=0.3", "--worker.num=2"])
    run_folder = RunFolder(folder)
    run_folder.live_file.write_text(dump(recipe))
    plan = make_plan(recipe, [str(index) for index in range(num_devices)], own_bus=False)
    specs = [
        ProcessSpec(name=each.name, command=["sleep", "60"], environment=dict(os.environ), phase=each.phase)
        for each in plan.processes
    ]
    async with supervised(specs, logs=folder, report=lambda line: None, kill_after_s=5.0) as supervisor:
        for spec in specs:
            supervisor.start(spec.name)
        yield local_fleet(plan, run_folder, Security()), supervisor


@pytest.mark.parametrize("counts", [{"rollout": 1}, {"rollout": 3}, {"rollout": 1, "worker": 1}], ids=str)
async def test_engines_that_share_a_gpu_neither_leave_nor_join(tmp_path: Path, counts: dict[str, int]) -> None:
    """One that has left could not come back; nothing of a refused request is done."""
    async with launched(tmp_path, 1) as (fleet, supervisor):
        with pytest.raises(ConfigError, match="GPU 0 is the only one, and its memory was divided at the start"):
            fleet.scale(counts, supervisor)
        assert fleet.scale({"rollout": 2}, supervisor) == ["the run has these numbers already"]


async def test_workers_beside_engines_that_share_a_gpu_may_leave(tmp_path: Path) -> None:
    """They have no share of it; and engines with GPUs of their own leave."""
    async with launched(tmp_path, 1) as (fleet, supervisor):
        assert fleet.scale({"worker": 1}, supervisor) == ["ending worker-1"]
    async with launched(tmp_path, 4) as (fleet, supervisor):
        assert fleet.scale({"rollout": 1}, supervisor) == ["ending rollout-1"]


def spec(name: str, *command: str) -> ProcessSpec:
    """A process of a run."""
    return ProcessSpec(name=name, command=command, environment=dict(os.environ), phase=StopPhase.SERVE)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("sh", "-c", "exit 2"), "new cannot start; see"),
        (("false",), "new exited with 1, death 1 in a row"),
        (("no-such-program",), "No such file or directory"),
    ],
)
async def test_a_process_that_fails_before_it_was_ready_leaves(
    tmp_path: Path, command: tuple[str, ...], why: str
) -> None:
    """The run, which may be hours old, goes on; what would end it otherwise is reported."""
    lines: list[str] = []
    left = asyncio.Event()
    old = spec("old", "sleep", "60")
    async with supervised([old], logs=tmp_path, report=lines.append, kill_after_s=5.0, max_restarts=0) as supervisor:
        supervisor.start("old")
        supervisor.add(spec("new", *command), left.set)
        await promptly(left.wait())
        assert [child.spec.name for child in supervisor.children] == ["old"]
        assert "new cannot join the run, which goes on without it: " in lines[0]
        assert why in lines[0]
        waiting = asyncio.create_task(supervisor.wait(asyncio.Event()))
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()


async def test_a_process_that_has_joined_may_end_the_run(tmp_path: Path) -> None:
    """As any other, once it was ready."""
    async with supervised([], logs=tmp_path, report=lambda line: None, kill_after_s=5.0, max_restarts=0) as supervisor:
        supervisor.add(
            spec("new", "sh", "-c", f"until [ -e {tmp_path}/fail ]; do sleep 0.02; done; exit 2"), lambda: None
        )
        (child,) = supervisor.children
        await until(lambda: child.is_running)
        assert await child.check_ready()
        (tmp_path / "fail").touch()
        with pytest.raises(UserError, match="new cannot start"):
            await promptly(supervisor.wait(asyncio.Event()))


async def test_a_process_may_leave_while_the_run_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last moment falls between the stop's list of processes and the wait for their ends."""
    begun, may_leave, left = asyncio.Event(), asyncio.Event(), asyncio.Event()
    forget = Child.forget

    async def forget_later(child: Child) -> None:
        begun.set()
        await may_leave.wait()
        await forget(child)

    monkeypatch.setattr(Child, "forget", forget_later)
    specs = [spec("old", "sleep", "60"), spec("leaving", "sleep", "60")]
    async with supervised(specs, logs=tmp_path, report=lambda line: None, kill_after_s=5.0) as supervisor:
        for child in supervisor.children:
            supervisor.start(child.spec.name)
        supervisor.retire("leaving", left.set)
        await promptly(begun.wait())
        stopping = asyncio.create_task(supervisor.stop())
        may_leave.set()
        await promptly(stopping)
        await promptly(left.wait())
        assert [child.spec.name for child in supervisor.children] == ["old"]
