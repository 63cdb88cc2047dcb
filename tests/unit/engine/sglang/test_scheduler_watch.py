"""A scheduler that answers nothing is noticed; one that is slow, or excused, is not."""

import asyncio
import itertools

import pytest

from services.rollout.engine.sglang import scheduler_watch
from services.rollout.engine.sglang.scheduler_watch import silence_limit_s, until_it_hangs
from tests.support.waiting import promptly, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other at once."""
    monkeypatch.setattr(scheduler_watch, "_LOOK_S", 0.001)
    monkeypatch.setattr(scheduler_watch, "_ASK_EVERY_S", 0.0)


class Scheduler:
    """Answers, or not."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_excused = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def ask(self) -> None:
        """Answer while it may."""
        self.num_asked += 1
        await self.answers.wait()

    def is_excused(self) -> bool:
        """For the first looks."""
        self.num_excused -= 1
        return self.num_excused >= 0


async def test_a_scheduler_that_stops_answering_is_noticed() -> None:
    """After it has answered, and not before."""
    scheduler = Scheduler()
    watching = asyncio.create_task(until_it_hangs(scheduler.ask, limit_s=0.0049, is_excused=scheduler.is_excused))
    await until(lambda: scheduler.num_asked >= 20)
    assert not watching.done()
    scheduler.answers.clear()
    await promptly(watching)


async def test_one_that_loads_weights_is_not_taken_for_hanging() -> None:
    """However long that takes; only the silence around it counts."""
    scheduler = Scheduler()
    scheduler.answers.clear()
    scheduler.num_excused = 50
    await promptly(until_it_hangs(scheduler.ask, limit_s=0.0049, is_excused=scheduler.is_excused))
    assert scheduler.num_excused == -5
    assert scheduler.num_asked == 1


async def test_excuses_now_and_then_do_not_hide_a_hang() -> None:
    """A trainer tries to push to the engine again and again, each time for a minute."""
    scheduler = Scheduler()
    scheduler.answers.clear()
    excuses = itertools.cycle([False, False, True])
    await promptly(until_it_hangs(scheduler.ask, limit_s=0.0049, is_excused=lambda: next(excuses)))
    assert scheduler.num_asked == 1


async def test_one_that_is_only_slow_is_borne() -> None:
    """A batch that takes a while."""
    scheduler = Scheduler()

    async def ask() -> None:
        scheduler.num_asked += 1
        for _ in range(3):
            await asyncio.sleep(0.0)

    watching = asyncio.create_task(until_it_hangs(ask, limit_s=0.0049, is_excused=lambda: False))
    await until(lambda: scheduler.num_asked >= 50)
    assert not watching.done()
    watching.cancel()
    await asyncio.wait({watching})


def test_sglangs_own_watchdog_comes_first() -> None:
    """It looks twice in its timeout, so that it bears up to one and a half of it; without it nothing hangs."""
    assert silence_limit_s(300.0) > 1.5 * 300.0
    assert silence_limit_s(0.0) == silence_limit_s(None) == float("inf")
