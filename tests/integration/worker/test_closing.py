"""A group is delivered before what its samples hold is closed; its worker's slot is free after that."""

from collections.abc import Callable

import pytest

from penstock.bus.connection import Bus
from penstock.testing.simulated_engine import SimulatedEngine
from services.recipe import Recipe
from services.rollout.worker.episodes import beginning
from tests.support.waiting import HANG_S, until
from tests.support.worker.lingering import LINGERS, Lingers
from tests.support.worker.prompts import count, make_prompt, publish, until_done, working


async def test_a_group_is_delivered_before_its_environments_are_closed(
    bus: Bus,
    engine: SimulatedEngine,
    make_recipe: Callable[..., Recipe],
    run_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one begins after that, so that no more environments are open than samples are played."""
    monkeypatch.setattr(beginning, "_CLOSE_TIMEOUT_S", 10 * HANG_S)
    Lingers.reset_all()
    recipe = make_recipe(engine.replica.address, concurrency=1, environments={"Lingers": LINGERS})
    for index in range(2):
        await publish(bus, make_prompt(run_name, index, environment="Lingers"))

    async def is_published() -> bool:
        return await count(bus, bus.groups) == 1

    async with working(recipe):
        await until(is_published)
        assert (await count(bus, bus.prompts), engine.num_calls, Lingers.num_open) == (2, 2, 2)
        Lingers.may_close.set()
        groups = await until_done(bus, 2)
    assert [[sample.reward for sample in group.samples] for group in groups] == [[1.0, 1.0]] * 2
    assert (Lingers.num_open, Lingers.max_open) == (0, 2)
