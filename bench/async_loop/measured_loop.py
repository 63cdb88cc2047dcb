"""Runs Penstock's own loop, bus, router and worker around simulated engines and a simulated optimizer step.

Every part is its own process, started as `penstock serve` starts it; only the engines (all in one process) and the
trainer's backend are simulated.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.parquet

from bench.async_loop.workload import Scenario
from penstock import config as configuration
from penstock.bus.local_server import local_server
from penstock.config import BusConfig, LogConfig, ModelConfig, RunConfig, SamplingConfig
from penstock.runtime.children.parent_death import dying_with_parent
from penstock.runtime.ports import free_ports
from services.recipe import Recipe
from services.rollout.engine.config import RolloutConfig
from services.rollout.worker.config import WorkerConfig
from services.router.config import RouterConfig
from services.trainer.config import TrainerConfig
from services.trainer.data.config import DataConfig
from services.trainer.evaluation.config import EvaluationConfig, EvaluationSetConfig
from services.trainer.evaluation.evaluation import MAX_IN_PLAY

ROOT = Path(__file__).resolve().parents[2]
ENGINES = "engines (simulated)"
_POLL_S = 0.1
_START_TIMEOUT_S = 180.0
_END_TIMEOUT_S = 60.0
_MANY_STEPS = 1_000_000
"""The run continues after the measured steps, until it is stopped."""


class LoopError(Exception):
    """The run did not do what is measured; the message has the ends of its logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of a run."""

    ends: list[float]
    """End of each optimizer step, by the machine's monotonic clock."""
    cpu_s: dict[str, float]
    """User and system time of each process between the first and the last counted step."""
    push_s: float
    """Mean seconds of a push over those steps."""
    pause_s: float
    """Mean seconds in which a push kept engines from generating."""
    prefill_ratio: float
    """Number of times that a group's prompt was computed; mean of those steps."""
    stale_groups: int
    """Groups played in vain; batch selection by deadline means that there are none."""


async def run_loop(
    scenario: Scenario,
    folder: Path,
    *,
    max_staleness: int,
    num_warmup: int,
    num_steps: int,
    timeout_s: float,
    num_evaluated: int = 0,
) -> Measured:
    """Train `num_steps` steps in `folder`; processor time counts from the end of step `num_warmup` on.

    With `num_evaluated`, this many prompts evaluate the first weights meanwhile.

    Raises:
        LoopError: a process ended, or the steps took longer than `timeout_s`.
    """
    folder.mkdir(parents=True)  # noqa: ASYNC240 - nothing else runs yet
    workload, steps_file = folder / "workload.json", folder / "steps.jsonl"
    scenario.workload.write(workload)
    steps_file.touch()
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(local_server(folder / "nats"))
        [nats] = [each for each in psutil.Process().children() if str(folder / "nats" / "nats.conf") in each.cmdline()]
        recipe = folder / "recipe.toml"
        settings = recipe_of(
            scenario, folder, BusConfig(url=url), max_staleness=max_staleness, num_evaluated=num_evaluated
        )
        recipe.write_text(configuration.dump(settings))
        config, simulated = ("--config", recipe), ("--workload", workload)
        size = ("--replicas", scenario.replicas, "--slots", scenario.slots_per_replica)
        engines = await stack.enter_async_context(
            serving(folder, "engines", "bench.async_loop.engines_process", *config, *simulated, *size)
        )
        parts = {"nats-server": nats.pid, ENGINES: engines.pid}
        for name in ("router", "worker"):
            started = await stack.enter_async_context(serving(folder, name, "services.cli", "serve", name, *config))
            parts[name] = started.pid
        await until_serving(engines, folder)
        trainer = await stack.enter_async_context(
            serving(
                folder, "trainer", "bench.async_loop.trainer_process", *config, *simulated, "--steps-file", steps_file
            )
        )
        parts["trainer"] = trainer.pid
        watch = Watch(folder, steps_file, parts)
        await watch.until(1, timeout_s=_START_TIMEOUT_S + timeout_s)
        await watch.until(num_warmup, timeout_s=timeout_s)
        before = watch.cpu_s()
        await watch.until(num_steps, timeout_s=timeout_s)
        cpu_s = {name: seconds - before[name] for name, seconds in watch.cpu_s().items()}
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    counted = [row for row in rows if num_warmup < row["step"] <= num_steps]
    return Measured(
        ends=watch.ends()[:num_steps],
        cpu_s=cpu_s,
        push_s=sum(row["push_s"] for row in counted) / max(1, len(counted)),
        pause_s=sum(row["push_pause_s"] for row in counted) / max(1, len(counted)),
        prefill_ratio=sum(row["prefill_ratio"] for row in counted) / max(1, len(counted)),
        stale_groups=rows[-1]["num_stale_groups"],
    )


def recipe_of(
    scenario: Scenario,
    folder: Path,
    bus: BusConfig,
    *,
    max_staleness: int,
    run_name: str = "async",
    num_evaluated: int = 0,
    **settings: Any,
) -> Recipe:
    """Return the recipe of a run in `folder`.

    Args:
        scenario: The engines and their work.
        folder: Gets the run's data and its folder, `run`.
        bus: The server.
        max_staleness: The bound.
        run_name: Name of the run.
        num_evaluated: Prompts of an evaluation of the first weights, with as many samples as a group; 0: none.
        settings: The trainer's settings.
    """
    rows = folder / "prompts.parquet"
    num_rows = max(64, num_evaluated)
    table = pyarrow.table({"problem": [f"What is {n} + {n}?" for n in range(num_rows)], "answer": ["0"] * num_rows})
    pyarrow.parquet.write_table(table, rows)
    router_port, reward_port = free_ports(2)
    capacity = (max_staleness + 1) * scenario.groups_per_step
    if num_evaluated:
        capacity += MAX_IN_PLAY
    played = EvaluationSetConfig(
        path=str(rows),
        environment="graded",
        num_prompts=num_evaluated,
        samples_per_prompt=scenario.workload.samples_per_group,
        max_new_tokens=scenario.workload.max_tokens,
    )
    return Recipe(
        model=ModelConfig(path=ROOT / "models" / "tiny-qwen3-vl"),
        run=RunConfig(name=run_name, folder=folder / "run", grace_s=0.0),
        bus=bus,
        log=LogConfig(level="warning", format="json"),
        data=DataConfig(path=str(rows), environment="graded"),
        sampling=SamplingConfig(max_new_tokens=scenario.workload.max_tokens),
        rollout=RolloutConfig(context_length=4096),
        router=RouterConfig(port=router_port, max_waiting=capacity * scenario.workload.samples_per_group),
        worker=WorkerConfig(
            concurrency=capacity,
            environments={"graded": "bench.async_loop.graded:Graded"},
            reward_address=f"127.0.0.1:{reward_port}",
            episode_timeout_s=3600.0,
        ),
        trainer=TrainerConfig(
            num_steps=_MANY_STEPS,
            groups_per_step=scenario.groups_per_step,
            samples_per_group=scenario.workload.samples_per_group,
            max_staleness=max_staleness,
            **settings,
        ),
        evaluation=EvaluationConfig(at_start=num_evaluated > 0, sets={"set": played} if num_evaluated else {}),
    )


@contextlib.asynccontextmanager
async def serving(
    folder: Path, name: str, module: str, *arguments: object
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a Python module; at the end, close its input, ask it to stop, and wait for it."""
    with (folder / f"{name}.log").open("wb") as log:
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            preexec_fn=dying_with_parent(),
        )
    try:
        yield started
    finally:
        assert started.stdin is not None
        started.stdin.close()
        if started.returncode is None:
            started.terminate()
        try:
            await asyncio.wait_for(started.wait(), _END_TIMEOUT_S)
        except TimeoutError:
            started.kill()
            await started.wait()


async def until_serving(engines: asyncio.subprocess.Process, folder: Path) -> None:
    assert engines.stdout is not None
    async with asyncio.timeout(_START_TIMEOUT_S):
        if not await engines.stdout.readline():
            raise LoopError(f"the engines did not start\n{_tails(folder)}")


class Watch:
    """Watches a run from outside."""

    def __init__(self, folder: Path, steps_file: Path, parts: dict[str, int]) -> None:
        self._folder = folder
        self._steps_file = steps_file
        self._parts = {name: psutil.Process(pid) for name, pid in parts.items()}

    def ends(self) -> list[float]:
        """Return the end of each step, by the clock of `time.monotonic` of this machine."""
        lines = self._steps_file.read_text().splitlines(keepends=True)
        return [json.loads(line)["ended"] for line in lines if line.endswith("\n")]

    def cpu_s(self) -> dict[str, float]:
        """Return user and system time so far."""
        times = {name: part.cpu_times() for name, part in self._parts.items()}
        return {name: each.user + each.system for name, each in times.items()}

    async def until(self, num_steps: int, *, timeout_s: float) -> None:
        """Wait until this many steps have ended."""
        deadline = time.monotonic() + timeout_s
        while len(self.ends()) < num_steps:
            dead = [name for name, part in self._parts.items() if not part.is_running() or part.status() == "zombie"]
            if dead or time.monotonic() > deadline:
                why = f"{', '.join(dead)} ended" if dead else f"step {num_steps} did not end within {timeout_s:.0f} s"
                raise LoopError(f"{why}\n{_tails(self._folder)}")
            await asyncio.sleep(_POLL_S)


def _tails(folder: Path) -> str:
    logs = sorted(folder.glob("*.log"))
    return "\n".join(f"== {path.name}\n" + "\n".join(path.read_text().splitlines()[-10:]) for path in logs)
