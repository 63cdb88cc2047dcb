"""A group is delivered before what its samples hold is closed; its worker's slot is free after that."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.bus.connection import Bus
from penstock.bus.sessions import Sessions
from penstock.bus.work_queue.consumer import Delivery
from penstock.model.chat.chat_template import Renderer
from penstock.records import SessionId
from penstock.testing.simulated_engine import SimulatedEngine
from services.recipe import Recipe
from services.rollout.worker.agents import agent_player
from services.rollout.worker.episodes import beginning
from tests.support.waiting import HANG_S, until
from tests.support.worker.agent_harness import LONG, RUNNERS, TEXT, Speaker
from tests.support.worker.lingering import LINGERS, Lingers
from tests.support.worker.prompts import count, make_prompt, publish, until_done, working


@pytest.fixture
async def engine(bus: Bus, renderer: Renderer) -> AsyncIterator[SimulatedEngine]:
    """An engine that agents can call, too."""
    answer = Speaker(renderer, [("", "The answer is \\boxed{3}")])
    async with SimulatedEngine(bus, answer=answer, policy_version=4).running() as engine:
        yield engine


async def until_published(bus: Bus) -> None:
    """The first group."""

    async def is_published() -> bool:
        return await count(bus, bus.groups) == 1

    await until(is_published)


async def test_a_group_is_delivered_before_its_environments_are_closed(
    bus: Bus,
    engine: SimulatedEngine,
    make_recipe: Callable[..., Recipe],
    run_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one begins after that, so that no more environments are open than samples are played."""
    monkeypatch.setattr(beginning, "_CLOSE_TIMEOUT_S", 10 * HANG_S)
    num_open_at_ack, ack = list[int](), Delivery.ack

    async def note(delivery: Delivery) -> None:
        num_open_at_ack.append(Lingers.num_open)
        await ack(delivery)

    monkeypatch.setattr(Delivery, "ack", note)
    Lingers.reset_all()
    recipe = make_recipe(engine.replica.address, concurrency=1, environments={"Lingers": LINGERS})
    for index in range(2):
        await publish(bus, make_prompt(run_name, index, environment="Lingers", sampling=LONG))
    async with working(recipe):
        await until_published(bus)
        assert (await count(bus, bus.prompts), engine.num_calls, Lingers.num_open) == (2, 2, 2)
        Lingers.may_close.set()
        groups = await until_done(bus, 2)
    assert [[sample.reward for sample in group.samples] for group in groups] == [[1.0, 1.0]] * 2
    assert (Lingers.num_open, Lingers.max_open) == (0, 2)
    assert num_open_at_ack == [0, 0]


async def test_a_worker_that_stops_while_environments_close_leaves_nothing_to_play_again(
    bus: Bus,
    engine: SimulatedEngine,
    make_recipe: Callable[..., Recipe],
    run_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The group is stored: its prompt is settled, although its environments were cut off."""
    monkeypatch.setattr(beginning, "_CLOSE_TIMEOUT_S", 10 * HANG_S)
    Lingers.reset_all()
    recipe = make_recipe(engine.replica.address, grace_s=0.0, environments={"Lingers": LINGERS})
    await publish(bus, make_prompt(run_name, environment="Lingers", sampling=LONG))
    async with working(recipe):
        await until_published(bus)
    assert (await count(bus, bus.prompts), await count(bus, bus.groups)) == (0, 1)


async def test_a_group_is_delivered_before_the_records_of_its_sessions_are_removed(
    bus: Bus,
    engine: SimulatedEngine,
    make_harness: Callable[..., Any],
    run_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One small message for each sample is left of them."""
    may_forget, forget = asyncio.Event(), Sessions.forget

    async def forget_late(sessions: Sessions, session: SessionId) -> None:
        await may_forget.wait()
        await forget(sessions, session)

    monkeypatch.setattr(Sessions, "forget", forget_late)
    recipe = await make_harness({"once": f"{RUNNERS}:ask_once"})
    await publish(bus, make_prompt(run_name, environment="once", sampling=LONG, **TEXT))
    async with working(recipe):
        await until_published(bus)
        may_forget.set()
        [group] = await until_done(bus, 1)
    assert [(sample.reward, len(sample.turns)) for sample in group.samples] == [(1.0, 1)] * 2
    assert await count(bus, bus.sessions) == 2


async def test_a_worker_that_stops_removes_the_records_of_sessions_that_it_gives_up(
    bus: Bus,
    engine: SimulatedEngine,
    make_harness: Callable[..., Any],
    run_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody plays on in them, whatever becomes of the group."""
    monkeypatch.setattr(agent_player, "_ABANDON_S", HANG_S)
    recipe = await make_harness({"hangs": f"{RUNNERS}:hang"}, grace_s=0.0)
    await publish(bus, make_prompt(run_name, environment="hangs", num_samples=1, sampling=LONG, **TEXT))

    async def is_recorded() -> bool:
        return await count(bus, bus.sessions) == 2

    async with working(recipe):
        await until(lambda: engine.num_calls)
        await until(is_recorded)
    assert await count(bus, bus.sessions) == 1
    assert await count(bus, bus.prompts) == 1
