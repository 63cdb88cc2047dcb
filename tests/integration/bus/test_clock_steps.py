"""The wall clock of a process jumps by an hour, on a real nats-server: locks and leases do not notice."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from nats.js.kv import KeyValue

from penstock.bus.buckets.leases import held
from penstock.bus.buckets.lock import claim
from penstock.bus.buckets.register import Register
from penstock.bus.buckets.watch import watched
from penstock.bus.connection import Bus, connect
from penstock.config import BusConfig
from penstock.runtime.process import end_task
from tests.support.waiting import promptly, until

FORWARD_S, BACK_S = 3600.0, -3600.0
NEVER_S = 600.0


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Move the wall clock of this process by this many seconds."""
    wall_s, wall_ns = time.time, time.time_ns

    def move(by_s: float) -> None:
        monkeypatch.setattr(time, "time", lambda: wall_s() + by_s)
        monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + int(by_s * 1e9))

    return move


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often claimants have looked at the lock."""
    count, read = 0, Register.read

    async def counted(register: Register) -> bool:
        nonlocal count
        count += 1
        return await read(register)

    monkeypatch.setattr(Register, "read", counted)
    return lambda: count


@pytest.fixture
async def other_bus(bus_config: BusConfig, run_name: str) -> AsyncIterator[Bus]:
    """A second process's connection to the same run."""
    async with connect(bus_config, run=run_name) as connection:
        yield connection


@pytest.mark.parametrize("by_s", [FORWARD_S, BACK_S])
async def test_a_claimant_whose_clock_jumps_waits_for_the_holder(
    bus: Bus, other_bus: Bus, step: Callable[[float], None], looks: Callable[[], int], by_s: float
) -> None:
    """It neither takes the lock over from a living holder, nor misses that the lock was released."""
    holder = await claim(bus, "trainer", ttl_s=NEVER_S)
    claiming = asyncio.create_task(claim(other_bus, "trainer", ttl_s=NEVER_S, poll_s=0.0))
    await until(lambda: looks() >= 3)
    step(by_s)
    seen = looks()
    await until(lambda: looks() >= seen + 3)
    assert not claiming.done()
    await holder.confirm()
    await holder.release()
    await promptly(claiming)


async def test_a_dead_holder_is_replaced_although_the_clock_went_back(
    bus: Bus, other_bus: Bus, step: Callable[[float], None], looks: Callable[[], int]
) -> None:
    """The hour that is missing is not waited for."""
    await claim(bus, "trainer", ttl_s=NEVER_S)
    claiming = asyncio.create_task(claim(other_bus, "trainer", ttl_s=1.0, poll_s=0.0))
    await until(lambda: looks() >= 3)
    step(BACK_S)
    await promptly(claiming)


async def test_a_lease_outlives_a_clock_that_goes_forward(bus: Bus, step: Callable[[float], None]) -> None:
    """A watcher whose clock jumps takes no living replica for dead."""
    bucket = await bus.bucket("leases", ttl_s=NEVER_S)
    async with held(bucket, "replica", lambda: b"here", ttl_s=NEVER_S), watched(bucket, ttl_s=NEVER_S) as watch:
        await until(lambda: watch.values)
        step(FORWARD_S)
        assert watch.values == {"replica": b"here"}


async def test_a_dead_lease_ends_although_the_clock_went_back(bus: Bus, step: Callable[[float], None]) -> None:
    """By the watcher's own count of seconds, while the server still has the value."""
    bucket = await bus.bucket("leases", ttl_s=NEVER_S)
    async with watched(bucket, ttl_s=1.0) as watch:
        renewing = asyncio.create_task(_renew(bucket))
        await until(lambda: watch.values)
        step(BACK_S)
        await end_task(renewing)
        await until(lambda: not watch.values)


async def _renew(bucket: KeyValue) -> None:
    while True:
        await bucket.put("replica", b"here")
        await asyncio.sleep(0.01)  # as its holder does, until the test ends it
