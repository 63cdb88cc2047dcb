"""A run of the real trainer, router and worker around simulated engines, each in a process that can be killed."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nats.js.errors import KeyNotFoundError

from bench.async_loop.measured_loop import recipe_of, serving, until_serving
from bench.async_loop.workload import Scenario
from penstock import config as configuration
from penstock.bus.buckets.replica_lease import read_replica
from penstock.bus.connection import Bus
from penstock.config import LogConfig
from penstock.records.held_out_replicas import HELD_OUT_KEY, read_held_out_replicas
from penstock.records.published_version import POLICY_BUCKET
from penstock.v1 import common_pb2, trainer_pb2
from services.trainer.demonstrations.config import DemonstrationsConfig
from services.trainer.evaluation.report import EVALUATIONS_FILE
from tests.support.waiting import until

WITHIN_S = 300.0
"""Processes that import torch, and an evaluation, on a loaded machine."""


@dataclass
class SimulatedRun:
    """One run, and how to kill parts of it."""

    bus: Bus
    folder: Path
    recipe: Path
    workload: Path
    num_slots: int
    stack: contextlib.AsyncExitStack
    engines: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    """The process of each living replica; all but the first share one."""
    trainer: asyncio.subprocess.Process | None = None
    num_trainers: int = 0

    async def start_engines(self, num: int) -> None:
        """Start replicas, the first in a process of its own."""
        parts = [(0, 1), (1, num - 1)] if num > 1 else [(0, 1)]
        started = [await self.stack.enter_async_context(self._engines(*part)) for part in parts]
        for (first, size), process in zip(parts, started, strict=True):
            await until_serving(process, self.folder)
            self.engines |= {f"engine-{number:04}": process for number in range(first, first + size)}

    async def start_trainer(self) -> None:
        """Start it; it goes on where another one has ended."""
        self.num_trainers += 1
        self.trainer = await self.stack.enter_async_context(
            serving(
                *(self.folder, f"trainer-{self.num_trainers}", "bench.async_loop.trainer_process"),
                *("--config", self.recipe, "--workload", self.workload, "--steps-file", self.folder / "steps.jsonl"),
            )
        )

    async def kill_trainer(self) -> None:
        """kill -9."""
        assert self.trainer is not None
        self.trainer.kill()
        await self.trainer.wait()

    async def kill_engine(self, replica_id: str) -> None:
        """kill -9."""
        self.engines[replica_id].kill()
        await self.engines.pop(replica_id).wait()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait, while the trainer lives."""

        def holds_or_ended() -> bool:
            assert self.trainer is not None
            assert self.trainer.returncode is None, self.tails()
            return holds()

        try:
            await until(holds_or_ended, timeout_s=WITHIN_S)
        except TimeoutError:
            raise AssertionError(self.tails()) from None

    def steps(self) -> list[int]:
        """Optimizer steps in the metrics, in order."""
        return [row["step"] for row in self.lines("metrics.jsonl")]

    def evaluations(self) -> list[dict[str, Any]]:
        """Evaluations that have ended."""
        return self.lines(EVALUATIONS_FILE)

    def samples(self) -> list[dict[str, Any]]:
        """Prompts of the first weights' evaluation that were played."""
        return self.lines("evaluations/step-000000/samples.jsonl")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Lines of this event in the logs of all trainers."""
        logs = "".join(path.read_text() for path in sorted(self.folder.glob("trainer-*.log")))
        lines = [json.loads(line) for line in logs.splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("event") == name]

    def lines(self, path: str) -> list[dict[str, Any]]:
        """Complete lines of a file of the run folder; none if it is not there."""
        file = self.folder / "run" / path
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    async def held_out(self) -> trainer_pb2.HeldOutReplicas:
        """What routers read."""
        bucket = await self.bus.bucket(POLICY_BUCKET)
        try:
            entry = await bucket.get(HELD_OUT_KEY)
        except KeyNotFoundError:
            return trainer_pb2.HeldOutReplicas()
        return read_held_out_replicas(entry.value or b"")

    async def until_held_out(self, *, besides: str = "") -> str:
        """Wait until exactly one replica is held out, and it is not `besides`; return its id."""
        found: list[str] = []

        async def is_held() -> bool:
            found[:] = (await self.held_out()).replica_ids
            return len(found) == 1 and found != [besides]

        await until(is_held, timeout_s=WITHIN_S)
        return found[0]

    async def replicas(self) -> dict[str, common_pb2.Replica]:
        """The living ones, by id."""
        bucket = await self.bus.bucket("replicas", ttl_s=self.bus.config.lease_ttl_s)
        found = {}
        for replica_id in self.engines:
            replica = read_replica(replica_id, (await bucket.get(replica_id)).value or b"")
            assert replica is not None
            found[replica_id] = replica
        return found

    def tails(self) -> str:
        """The ends of all logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {path.name}\n" + "\n".join(path.read_text().splitlines()[-12:]) for path in logs)

    def _engines(self, first: int, num: int) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
        return serving(
            *(self.folder, f"engines-{first}", "bench.async_loop.engines_process", "--config", self.recipe),
            *("--workload", self.workload, "--slots", self.num_slots, "--replicas", num, "--first", first),
        )


@asynccontextmanager
async def simulated_run(
    bus: Bus,
    run_name: str,
    folder: Path,
    pool: Scenario,
    *,
    num_evaluated: int,
    held_out_replicas: int = 1,
    demonstrations: DemonstrationsConfig | None = None,
    **settings: Any,
) -> AsyncIterator[SimulatedRun]:
    """Run `pool` with an evaluation of the first weights; `settings` are the trainer's."""
    folder.mkdir()
    recipe, workload = folder / "recipe.toml", folder / "workload.json"
    pool.workload.write(workload)
    made = recipe_of(
        pool, folder, bus.config, max_staleness=1, run_name=run_name, num_evaluated=num_evaluated, **settings
    )
    evaluation = made.evaluation.model_copy(update={"held_out_replicas": held_out_replicas})
    logged = LogConfig(level="info", format="json")
    made = made.model_copy(update={"log": logged, "demonstrations": demonstrations, "evaluation": evaluation})
    recipe.write_text(configuration.dump(made))
    async with contextlib.AsyncExitStack() as stack:
        for name in ("router", "worker"):
            await stack.enter_async_context(serving(folder, name, "services.cli", "serve", name, "--config", recipe))
        run = SimulatedRun(bus, folder, recipe, workload, pool.slots_per_replica, stack)
        await run.start_engines(pool.replicas)
        await run.start_trainer()
        yield run
