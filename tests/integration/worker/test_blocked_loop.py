"""An async environment that blocks stops its worker, which says so."""

import asyncio
import time
from collections.abc import Callable
from typing import ClassVar

from structlog.typing import EventDict

from penstock.bus.connection import Bus
from penstock.environments import AssistantTurn, Observation, StepResult, Task
from penstock.testing.simulated_engine import SimulatedEngine
from services.recipe import Recipe
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.registry import EnvironmentRegistry
from tests.support.waiting import HANG_S
from tests.support.worker.hosted_episodes import HERE
from tests.support.worker.prompts import make_prompt, publish, until_done, working

LIMIT_S = 0.05


class Blocks:
    """Blocks the loop in its step until that was noticed."""

    events: ClassVar[list[EventDict]] = []

    async def reset(self, task: Task) -> Observation:
        """The task as it is."""
        return Observation(messages=task.messages, images=task.images)

    async def step(self, turn: AssistantTurn) -> StepResult:
        """The end, late."""
        await asyncio.sleep(2 * LIMIT_S)  # the loop turns, so that what follows is a block of its own
        ends_at = time.monotonic() + HANG_S
        while time.monotonic() < ends_at and not self.reports():
            time.sleep(0.01)  # noqa: ASYNC251 - what is tested
        return StepResult(observation=None)

    async def close(self) -> None:
        """Nothing is held."""

    @classmethod
    def reports(cls) -> list[EventDict]:
        """What was reported of its step."""
        return [event for event in cls.events if "in step\n" in event.get("stack", "")]


async def test_a_worker_names_what_blocks_it(
    bus: Bus,
    engine: SimulatedEngine,
    make_recipe: Callable[..., Recipe],
    run_name: str,
    logged: list[EventDict],
) -> None:
    """The environment, the line that it is in, and what to do; the episode goes on when it returns."""
    Blocks.events = logged
    await publish(bus, make_prompt(run_name, environment="Blocks", num_samples=1))
    recipe = make_recipe(engine.replica.address, environments={"Blocks": f"{__name__}:Blocks"})
    async with working(recipe, loop_limit_s=LIMIT_S):
        [group] = await until_done(bus, 1)
    assert [sample.finish_reason for sample in group.samples] == ["stop"]
    [report] = Blocks.reports()
    assert (report["event"], report["environments"]) == ("loop.blocked", ["Blocks"])
    assert "test_blocked_loop.py" in report["stack"]
    assert "set isolated = true" in report["remedy"]


async def test_only_an_environment_in_the_loop_can_block_it() -> None:
    """Not one in a process of its own or at a server."""
    tables = {"Blocks": f"{__name__}:Blocks", "Echo": f"{HERE}:Echo", "far": {"url": "http://127.0.0.1:1"}}
    registry = EnvironmentRegistry(WorkerConfig(environments=tables).environments)
    async with registry.room("Blocks"), registry.room("Echo"), registry.room("far"), registry.room("Blocks"):
        assert registry.in_loop() == ["Blocks"]
    assert registry.in_loop() == []
