"""The lock that one trainer of a run holds, and keys written by compare-and-set, on a real nats-server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import nats.js.errors
import pytest
from nats.js.kv import KeyValue
from structlog.testing import capture_logs

from penstock.bus.buckets.lock import claim, locked
from penstock.bus.buckets.register import open_register
from penstock.bus.connection import Bus, connect
from penstock.bus.local_server import local_server
from penstock.config import BusConfig
from penstock.errors import SetupError, SupersededError
from penstock.runtime.process import end_task
from tests.support.waiting import HANG_S, promptly, until


class Clock:
    """Advances by a second at each look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.fixture
async def other_bus(bus_config: BusConfig, run_name: str) -> AsyncIterator[Bus]:
    """A second process's connection to the same run."""
    async with connect(bus_config, run=run_name) as connection:
        yield connection


async def test_a_frozen_holder_that_was_replaced_is_refused(bus: Bus, other_bus: Bus) -> None:
    """A claimant takes over from a holder that does not renew, whose next confirm raises."""
    frozen = await claim(bus, "trainer", ttl_s=3.0)
    successor = await claim(other_bus, "trainer", ttl_s=3.0, clock=Clock(), poll_s=0.0)
    with pytest.raises(SupersededError, match="another process has taken over as trainer"):
        await frozen.confirm()
    await successor.confirm()


async def test_a_holder_that_was_silent_goes_on_if_nobody_replaced_it(bus: Bus, other_bus: Bus) -> None:
    """Silence alone loses nothing: the compare-and-set proves that nobody else held the lock meanwhile."""
    holder = await claim(bus, "trainer", ttl_s=0.0)
    assert (await open_register(other_bus, await other_bus.bucket("locks"), "trainer")).value != b""
    await holder.confirm()
    await holder.confirm()


async def test_a_holder_that_renews_is_not_replaced(bus: Bus, other_bus: Bus) -> None:
    """A claimant sees the renewals, and says who holds the lock and what to do."""
    holder = await claim(bus, "trainer", ttl_s=3.0)

    async def renew() -> None:
        while True:
            await holder.confirm()

    renewing = asyncio.create_task(renew())
    with pytest.raises(
        SetupError, match=r"another trainer of this run is running already .*pid.*choose another run\.name"
    ):
        await claim(other_bus, "trainer", ttl_s=20.0, clock=Clock(), poll_s=0.05)
    assert not renewing.done()
    await end_task(renewing)


async def test_losing_the_lock_ends_the_holder(bus: Bus, other_bus: Bus) -> None:
    """The context's body is cancelled, and the context raises; what the body was waiting for would never have come."""

    async def hold_until_replaced() -> None:
        async with locked(bus, "trainer", ttl_s=0.3):
            await claim(other_bus, "trainer", ttl_s=0.0)
            await asyncio.Event().wait()

    with pytest.raises(SupersededError):
        await hold_until_replaced()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_losing_the_lock_ends_a_holder_that_swallows_a_cancellation(bus: Bus, other_bus: Bus) -> None:
    """As `asyncio.wait_for` of Python 3.11 can: it is cancelled again, and leaves no cancellation behind."""
    num_swallowed = 0

    async def hold_until_replaced() -> None:
        nonlocal num_swallowed
        async with locked(bus, "trainer", ttl_s=0.3):
            try:
                await claim(other_bus, "trainer", ttl_s=0.0)
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                num_swallowed += 1
            await asyncio.Event().wait()

    async with asyncio.timeout(HANG_S):
        with pytest.raises(SupersededError):
            await hold_until_replaced()
    task = asyncio.current_task()
    assert task is not None
    assert (num_swallowed, task.cancelling()) == (1, 0)


async def test_losing_the_lock_is_an_error_of_a_holder_that_ends_in_order(bus: Bus, other_bus: Bus) -> None:
    """Its body swallowed the cancellation at its very end."""

    async def hold_until_replaced() -> None:
        async with locked(bus, "trainer", ttl_s=0.3):
            await claim(other_bus, "trainer", ttl_s=0.0)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    with pytest.raises(SupersededError):
        await hold_until_replaced()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_an_error_of_the_body_comes_through_unchanged(bus: Bus) -> None:
    """So does a cancellation from outside, which is not taken for a loss."""
    with pytest.raises(ZeroDivisionError):
        async with locked(bus, "trainer", ttl_s=3.0):
            raise ZeroDivisionError
    is_held = asyncio.Event()

    async def hold() -> None:
        async with locked(bus, "trainer", ttl_s=3.0):
            is_held.set()
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    await promptly(is_held.wait())
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding


async def test_a_released_lock_is_free_at_once(bus: Bus, other_bus: Bus) -> None:
    """An orderly end leaves nothing to wait for: the claimant's clock stands still."""
    async with locked(bus, "trainer", ttl_s=30.0):
        pass
    await claim(other_bus, "trainer", ttl_s=30.0, clock=lambda: 0.0)


async def test_of_two_that_claim_at_once_one_gets_the_lock(bus: Bus, other_bus: Bus) -> None:
    """Also when both saw the same holder go silent."""
    await claim(bus, "trainer", ttl_s=3.0)
    claims = [claim(each, "trainer", ttl_s=3.0, clock=Clock(), poll_s=0.0) for each in (bus, other_bus)]
    locks = await asyncio.gather(*claims, return_exceptions=True)
    confirmed = 0
    for lock in locks:
        with contextlib.suppress(SupersededError):
            if not isinstance(lock, BaseException):
                await lock.confirm()
                confirmed += 1
    assert confirmed == 1


async def test_a_holder_waits_for_a_server_that_restarts(tmp_path: Path, run_name: str) -> None:
    """The lock is on disk; the holder confirms it when the server is back."""
    async with contextlib.AsyncExitStack() as first:
        url = await first.enter_async_context(local_server(tmp_path))
        async with connect(BusConfig(url=url), run=run_name) as bus, locked(bus, "trainer", ttl_s=0.5) as lock:
            await first.aclose()
            async with local_server(tmp_path, port=int(url.rsplit(":", 1)[1])):
                await lock.confirm()


async def test_an_outage_of_the_server_is_not_the_holders_silence(tmp_path: Path, run_name: str) -> None:
    """A claimant that could not read counts from the moment when the server is back: the holder could not write."""
    now_s, num_looks = 0.0, 0

    def clock() -> float:
        nonlocal num_looks
        num_looks += 1
        return now_s

    async with contextlib.AsyncExitStack() as first:
        url = await first.enter_async_context(local_server(tmp_path))
        async with connect(BusConfig(url=url), run=run_name) as bus, connect(BusConfig(url=url), run=run_name) as other:
            holder = await claim(bus, "trainer", ttl_s=3.0)
            claiming = asyncio.create_task(claim(other, "trainer", ttl_s=3.0, clock=clock, poll_s=0.0))
            await until(lambda: num_looks > 10)
            with capture_logs() as events:
                await first.aclose()
                await until(lambda: any(event["event"] == "bus.store_retried" for event in events))
            now_s, looks_before = 100.0, num_looks
            async with local_server(tmp_path, port=int(url.rsplit(":", 1)[1])):
                await until(lambda: num_looks > looks_before + 10)
                assert not claiming.done()
                now_s = 103.0
                await claiming
                with pytest.raises(SupersededError):
                    await holder.confirm()


async def test_of_two_writers_that_read_the_same_value_one_is_refused(bus: Bus, other_bus: Bus) -> None:
    """So a version number that a process has claimed stands for nobody else's weights."""
    bucket = await bus.bucket("policy")
    mine, others = await open_register(bus, bucket, "reserved"), await open_register(other_bus, bucket, "reserved")
    assert (mine.value, mine.revision) == (b"", 0)
    await mine.write(b"7 by me")
    with pytest.raises(SupersededError, match="'reserved'"):
        await others.write(b"7 by another")
    await mine.write(b"8 by me")
    await others.read()
    assert others.value == b"8 by me"
    await others.write(b"9 by another")


async def test_a_write_whose_answer_was_lost_counts(bus: Bus) -> None:
    """The repetition finds its own value, and writes it again on the revision that it has."""
    bucket = await bus.bucket("policy")
    register = await open_register(bus, bucket, "reserved")
    await bucket.create("reserved", b"7 by me")  # what the server stored, unheard
    await register.write(b"7 by me")
    await register.write(b"8 by me")
    assert (await bucket.get("reserved")).value == b"8 by me"


async def test_a_deleted_key_can_be_written(bus: Bus) -> None:
    """Its revision goes on."""
    bucket = await bus.bucket("policy")
    await bucket.put("reserved", b"1")
    await bucket.delete("reserved")
    register = await open_register(bus, bucket, "reserved")
    assert register.value == b""
    await register.write(b"2")


async def test_a_write_that_waits_for_an_earlier_one_is_no_loss(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster refuses a second write while the first is on its way through it; nobody else has written."""
    register = await open_register(bus, await bus.bucket("policy"), "claimed")
    await register.write(b"1 by me")
    refusals = iter([nats.js.errors.KeyWrongLastSequenceError(description="wrong last sequence")] * 2)
    write = KeyValue.update

    async def write_behind_another(self: KeyValue, *args: object, **options: object) -> int:
        if error := next(refusals, None):
            raise error
        return await write(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(KeyValue, "update", write_behind_another)
    await register.write(b"2 by me")
    assert (await (await bus.bucket("policy")).get("claimed")).value == b"2 by me"


async def test_a_holder_is_confirmed_by_a_write_and_never_by_a_read(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was cut off from its cluster goes on saying who held the lock, while another process takes it."""
    lock = await claim(bus, "trainer", ttl_s=3.0)
    num_written, write = 0, KeyValue.update

    async def count(self: KeyValue, *args: object, **options: object) -> int:
        nonlocal num_written
        num_written += 1
        if num_written <= 3:
            raise nats.js.errors.KeyWrongLastSequenceError(description="wrong last sequence")
        return await write(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(KeyValue, "update", count)
    await lock.confirm()
    assert num_written == 4
