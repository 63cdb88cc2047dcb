"""Draining: who may finish, who is handed over, and that it happens once."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.rollout.engine.drain import Drain, Drained
from services.rollout.engine.server import EngineServer
from tests.support.waiting import settled, until


class Calls:
    """Calls that end when they are told to."""

    def __init__(self, count: int) -> None:
        self.num_in_flight = count
        self.reasons: list[str] = []
        self.num_begun = 0
        self._idle = asyncio.Event()
        if not count:
            self._idle.set()

    async def begin(self) -> None:
        self.num_begun += 1

    async def idle(self) -> None:
        await self._idle.wait()

    def end(self, count: int = 1) -> None:
        self.num_in_flight -= count
        if not self.num_in_flight:
            self._idle.set()

    def hand_over(self, reason: str) -> None:
        self.reasons.append(reason)
        self.end(self.num_in_flight)


async def test_calls_that_finish_in_time_are_not_disturbed() -> None:
    """It ends with the last of them, long before the grace is over."""
    calls = Calls(2)
    draining = asyncio.create_task(Drain(calls, calls.begin).run(3600.0))
    await settled()
    assert calls.num_begun == 1
    calls.end()
    await settled()
    assert not draining.done()
    calls.end()
    assert await draining == Drained(num_finished=2, num_handed_over=0)


@pytest.mark.parametrize(("has_died", "expected_s"), [(False, 7.0), (True, 0.0)])
async def test_an_engine_that_ends_gives_calls_the_grace_of_its_run(has_died: bool, expected_s: float) -> None:
    """One whose SGLang has died gives none."""
    graces: list[float] = []

    async def run(grace_s: float) -> None:
        graces.append(grace_s)

    server: Any = SimpleNamespace(
        engine=SimpleNamespace(died=asyncio.Event()),
        crashes=SimpleNamespace(is_useless=asyncio.Event()),
        drain=SimpleNamespace(run=run),
    )
    if has_died:
        server.engine.died.set()
    await EngineServer.end_service(server, 7.0)
    assert graces == [expected_s]


async def test_the_rest_is_handed_over_when_it_is_hurried() -> None:
    """They hear why, and what to do."""
    calls = Calls(3)
    drain = Drain(calls, calls.begin)
    draining = asyncio.create_task(drain.run(3600.0))
    await settled()
    calls.end()
    await drain.run(0.0)
    assert await draining == Drained(num_finished=1, num_handed_over=2)
    assert "play the rest on another replica" in calls.reasons[0]


async def test_it_happens_once_and_the_shortest_grace_counts() -> None:
    """A second caller cannot prolong it, but can hurry it; both hear the same, and so does whoever asks later."""
    calls = Calls(4)
    drain = Drain(calls, calls.begin)
    patient = asyncio.create_task(drain.run(3600.0))
    await settled()
    more_patient = asyncio.create_task(drain.run(7200.0))
    await settled()
    assert not patient.done()
    hurried = await drain.run(0.0)
    assert hurried == await patient == await more_patient == Drained(num_finished=0, num_handed_over=4)
    assert await drain.run(5.0) == hurried
    assert (calls.num_begun, len(calls.reasons)) == (1, 1)


async def test_it_goes_on_when_whoever_asked_is_gone() -> None:
    """A command that is interrupted leaves a replica that drains, not one that is half drained for ever."""
    calls = Calls(1)
    drain = Drain(calls, calls.begin)
    asking = asyncio.create_task(drain.run(0.05))
    await settled()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: calls.reasons)


async def test_an_idle_replica_is_drained_at_once() -> None:
    """Nothing to wait for."""
    calls = Calls(0)
    assert await Drain(calls, calls.begin).run(3600.0) == Drained(num_finished=0, num_handed_over=0)
