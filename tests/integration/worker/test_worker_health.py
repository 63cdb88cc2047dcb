"""A worker has no service to call, but says whether it is at work."""

import asyncio
from collections.abc import Callable

from penstock.runtime.health import health_of
from penstock.runtime.ports import free_ports
from penstock.testing.simulated_engine import SimulatedEngine
from services.recipe import Recipe
from tests.support.waiting import HANG_S, until
from tests.support.worker.prompts import working


async def test_a_worker_is_healthy_as_long_as_it_takes_prompts(
    engine: SimulatedEngine, make_recipe: Callable[..., Recipe]
) -> None:
    """SERVING from when it listens to the queue; nobody is there when it has ended."""
    (port,) = free_ports(1)
    answers: list[str] = []

    async def serves() -> bool:
        answers.append(await asyncio.to_thread(health_of, f"127.0.0.1:{port}", timeout_s=HANG_S))
        return answers[-1] == "SERVING"

    async with working(make_recipe(engine.replica.address, port=port)):
        await until(serves)
    assert not await serves()
    assert set(answers) == {"SERVING", "UNAVAILABLE"}
