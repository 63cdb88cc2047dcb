"""Workers share the queue, keep what they play alive, die and stop."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.bus.connection import Bus
from penstock.testing.simulated_engine import SimulatedEngine
from services.recipe import Recipe
from tests.support.bus.work_queue import until_beaten
from tests.support.waiting import until
from tests.support.worker.prompts import (
    count,
    make_prompt,
    publish,
    until_done,
    working,
)


async def test_a_worker_killed_while_playing_loses_nothing(
    bus: Bus, engine: SimulatedEngine, make_recipe: Callable[..., Recipe], run_name: str, tmp_path: Path
) -> None:
    """kill -9 in the middle: the prompts go to the next worker, and each group is published once."""
    engine.delay_s = 600.0
    recipe = make_recipe(engine.replica.address)
    config = tmp_path / "recipe.json"
    config.write_text(recipe.model_dump_json())
    for index in range(3):
        await publish(bus, make_prompt(run_name, index))
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.support.worker.process", str(config))
    await until(lambda: engine.num_running == 6)
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    await until(lambda: engine.num_running == 0)
    assert await count(bus, bus.groups) == 0
    engine.delay_s = 0.0
    async with working(recipe):
        groups = await until_done(bus, 3)
    assert sorted(group.id.index for group in groups) == [0, 1, 2]
    assert await count(bus, bus.dead) == 0


async def test_workers_share_the_queue_and_play_each_prompt_once(
    bus: Bus, engine: SimulatedEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """Two workers, twelve prompts, twelve groups."""
    engine.hang_after = 0
    recipe = make_recipe(engine.replica.address, concurrency=2, ack_wait_s=60.0)
    for index in range(12):
        await publish(bus, make_prompt(run_name, index))
    async with working(recipe), working(recipe):
        await until(lambda: engine.num_running == 8)  # both have as many groups as they take, of two samples
        engine.released.set()
        groups = await until_done(bus, 12)
    assert sorted(group.id.index for group in groups) == list(range(12))
    assert len({group.worker_id for group in groups}) == 2
    assert engine.num_answered == 24


async def test_workers_may_hold_what_thousands_of_engines_play(
    bus: Bus, engine: SimulatedEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """The server hands out no prompt beyond this bound, and engines would idle."""
    await publish(bus, make_prompt(run_name))
    async with working(make_recipe(engine.replica.address)):
        await until_done(bus, 1)
    consumer = await bus.jetstream.consumer_info(bus.prompts.name, "workers")
    assert (consumer.config.max_ack_pending or 0) > 2048 * 64 / 8


@pytest.mark.slow
async def test_a_long_group_is_kept_alive_and_played_once(
    bus: Bus, engine: SimulatedEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """Longer than ack_wait_s: signs of life keep the prompt from being delivered to another worker."""
    engine.hang_after = 0
    recipe = make_recipe(engine.replica.address, ack_wait_s=8.0)
    await publish(bus, make_prompt(run_name))
    async with working(recipe), working(recipe):
        await until_beaten(bus, 4)
        engine.released.set()
        await until_done(bus, 1)
    assert engine.num_calls == 2


async def test_a_worker_that_stops_finishes_what_it_can(
    bus: Bus, engine: SimulatedEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """Within the grace period groups in hand are published."""
    engine.delay_s = 1.0
    await publish(bus, make_prompt(run_name))
    async with working(make_recipe(engine.replica.address, grace_s=10.0)) as stop:
        await until(lambda: engine.num_calls == 2)
        stop.set()
    assert (await count(bus, bus.groups), await count(bus, bus.prompts)) == (1, 0)


async def test_a_worker_that_stops_puts_back_at_once_what_it_cannot_finish(
    bus: Bus, engine: SimulatedEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """The engine's requests are cancelled, and another worker has the prompt without waiting for the ack deadline."""
    engine.delay_s = 600.0
    slow_to_expire = make_recipe(engine.replica.address, grace_s=0.2, ack_wait_s=60.0)
    await publish(bus, make_prompt(run_name))
    async with working(slow_to_expire) as stop:
        await until(lambda: engine.num_running == 2)
        stop.set()
    await until(lambda: engine.num_cancelled == 2)
    engine.delay_s = 0.0
    async with working(slow_to_expire):
        await until_done(bus, 1)
