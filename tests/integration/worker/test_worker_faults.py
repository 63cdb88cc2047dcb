"""Prompts that cannot be played, and groups that fail: reported, buried or put back."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from structlog.typing import EventDict

from penstock.bus.connection import Bus
from penstock.bus.image_store import hash_of
from penstock.errors import InvalidRequestError, PoisonError, SetupError, UnavailableError
from penstock.records import Prompt
from penstock.records.codec import decode, encode
from penstock.runtime.security import Security
from penstock.telemetry import metrics
from penstock.testing.simulated_engine import SimulatedEngine
from services.launch.settings import service_settings
from services.recipe import Recipe
from services.rollout.worker.main import serve
from tests.support.deadlines import long_enough
from tests.support.waiting import HANG_S, until
from tests.support.worker.prompts import (
    count,
    make_prompt,
    publish,
    read,
    until_done,
    working,
)


async def published() -> Counter[str]:
    """Groups that workers of this process have counted as published, by outcome."""
    counts = re.findall(r'penstock_worker_groups_total\{outcome="(\w+)"\} (\d+)', (await metrics.page()).decode())
    return Counter({outcome: int(number) for outcome, number in counts})


async def test_a_prompt_that_can_never_be_played_is_reported_and_buried_at_once(
    bus: Bus, engine: SimulatedEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """The trainer gets the reason as a group, a person gets the prompt as a dead letter, the queue goes on."""
    engine.error = InvalidRequestError("image 0 cannot be read")
    prompt = make_prompt(run_name)
    await publish(bus, prompt)
    async with working(make_recipe(engine.replica.address)):
        [group] = await until_done(bus, 1)
        engine.error = None
        await publish(bus, make_prompt(run_name, 1))
        assert (await until_done(bus, 2))[1].error == ""
    assert group.id == prompt.id
    assert group.samples == ()
    assert "image 0 cannot be read" in group.error
    [letter] = await read(bus, bus.dead)
    assert decode(letter, Prompt) == prompt


async def test_a_group_that_no_message_can_carry_is_given_up_at_once(
    bus: Bus,
    engine: SimulatedEngine,
    make_recipe: Callable[..., Recipe],
    run_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be as large the next time: the trainer and a person get the reason, and it is played once. It counts as
    one group."""
    monkeypatch.setattr("penstock.bus.connection._MAX_RECORD_BYTES", 20_000)
    before, prompt = await published(), make_prompt(run_name, num_samples=64)
    await publish(bus, prompt)
    async with working(make_recipe(engine.replica.address)):
        [group] = await until_done(bus, 1)
    assert group.samples == ()
    assert re.search(r"of \d+ bytes is over .* or make groups smaller", group.error)
    assert len(engine.requests) == 64
    assert await count(bus, bus.dead) == 1
    assert await published() - before == {"given_up": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"golds": ("\\frac{",), "profile": "math"}, "gold answers"),
        ({"profile": "astrology"}, "astrology"),
        ({"environment": "chess"}, "environment 'chess' is unknown"),
    ],
)
async def test_faults_of_the_data_fail_the_group_with_their_reason(
    bus: Bus,
    engine: SimulatedEngine,
    make_recipe: Callable[..., Recipe],
    run_name: str,
    changes: dict[str, Any],
    reason: str,
) -> None:
    """Judged by the real reward service: never a silent zero."""
    await publish(bus, make_prompt(run_name, **changes))
    async with working(make_recipe(engine.replica.address)):
        [group] = await until_done(bus, 1)
    assert reason in group.error
    assert await count(bus, bus.dead) == 1


async def test_garbage_on_the_queue_is_buried(
    bus: Bus, engine: SimulatedEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """It goes to the dead letters, and on to the trainer, whom its id tells which group will not come."""
    before = await published()
    await bus.publish(bus.prompts, b"\xc1 garbage", message_id=f"{run_name}/7/0/a")
    async with working(make_recipe(engine.replica.address)):

        async def is_empty() -> bool:
            return await count(bus, bus.prompts) == 0

        await until(is_empty)
    assert await read(bus, bus.groups) == [b"\xc1 garbage"]
    [letter] = await read(bus, bus.dead)
    assert letter == b"\xc1 garbage"
    assert await published() - before == {"given_up": 1}


async def test_a_prompt_that_fails_again_and_again_is_given_up(
    bus: Bus, engine: SimulatedEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """After `max_deliveries`, each cut off by the wait timeout, the trainer is told."""
    engine.error = UnavailableError("the engine is broken")
    errors: list[str] = []

    async def play(wait_timeout_s: float) -> None:
        await publish(bus, make_prompt(run_name, len(errors)))
        async with working(make_recipe(engine.replica.address), wait_timeout_s=wait_timeout_s, max_deliveries=2):
            errors.append((await until_done(bus, len(errors) + 1))[-1].error)

    await long_enough(play, lambda: "the engine is broken" in errors[-1])
    assert all(errors)
    assert await count(bus, bus.dead) == len(errors)


async def test_a_turn_that_takes_too_long_ends_its_sample_and_nothing_is_drawn_again(
    bus: Bus, engine: SimulatedEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """The group holds the tokens that came, after one delivery; the engine stops generating."""
    engine.hang_after = 2
    await publish(bus, make_prompt(run_name))
    async with working(make_recipe(engine.replica.address, episode_timeout_s=1.0)):
        [group] = await until_done(bus, 1)
        await until(lambda: engine.num_running == 0)
    assert [sample.finish_reason for sample in group.samples] == ["deadline", "deadline"]
    assert [sample.num_own_tokens for sample in group.samples] == [2, 2]
    assert (group.error, engine.num_calls) == ("", 2)


async def test_a_prompt_that_breaks_every_replica_is_buried_at_once(
    bus: Bus, engine: SimulatedEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """One delivery and one call for each sample: what broke three replicas is not sent to more."""
    engine.error = PoisonError("given up after 3 replicas failed")
    await publish(bus, make_prompt(run_name))
    async with working(make_recipe(engine.replica.address)):
        [group] = await until_done(bus, 1)
    assert "given up after 3 replicas failed" in group.error
    assert engine.num_calls <= 2
    assert await count(bus, bus.dead) == 1


async def test_a_prompt_that_finds_no_replica_in_time_is_put_back_and_cancelled(
    bus: Bus,
    engine: SimulatedEngine,
    make_recipe: Callable[..., Recipe],
    run_name: str,
    logged: list[EventDict],
) -> None:
    """The engine is not left generating for it; the next try succeeds, here of a worker that waits longer."""
    recipe = make_recipe(engine.replica.address, grace_s=0.0)
    errors: list[str] = []

    async def play(wait_timeout_s: float) -> None:
        engine.delay_s = 600.0
        logged.clear()
        await publish(bus, make_prompt(run_name, len(errors)))
        async with working(recipe, wait_timeout_s=wait_timeout_s):
            await until(lambda: "message.put_back" in [event["event"] for event in logged])
        await until(lambda: engine.num_running == 0)
        engine.delay_s = 0.0
        async with working(recipe):
            errors.append((await until_done(bus, len(errors) + 1))[-1].error)

    await long_enough(play, lambda: engine.num_cancelled >= 2)
    assert not any(errors)


async def test_a_worker_whose_stream_of_images_is_gone_ends_and_keeps_its_prompts(
    bus: Bus, engine: SimulatedEngine, make_recipe: Callable[..., Recipe], run_name: str
) -> None:
    """Each delivery would fail, until the prompts were buried: a person must start the run again."""
    settings = service_settings.for_worker(make_recipe(engine.replica.address))
    serving = asyncio.create_task(serve(settings, asyncio.Event(), security=Security()))
    await publish(bus, make_prompt(run_name))
    await until_done(bus, 1)
    await bus.jetstream.delete_stream(bus.images.name)
    prompt = make_prompt(run_name, 1, images=(hash_of(b"not in the worker's cache"),))
    await bus.publish(bus.prompts, encode(prompt), message_id=prompt.id.message)
    with pytest.raises(SetupError, match=f"{bus.images.name} is gone"):
        await asyncio.wait_for(serving, HANG_S)
    assert (await count(bus, bus.prompts), await count(bus, bus.dead)) == (1, 0)
