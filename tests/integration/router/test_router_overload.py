"""The router with more calls than replicas can take: limits, the wait queue, and what full means."""

import asyncio

import grpc

from penstock.bus.connection import Bus
from penstock.errors import OverloadedError
from tests.support.router.routers import failure, pool
from tests.support.waiting import HANG_S, promptly, until


async def test_calls_beyond_the_limit_wait_in_the_queue(steady_bus: Bus) -> None:
    """First come, first served, one slot at a time; a cancelled call leaves the queue, and all others are answered."""
    limit = {"factor": 1.0}
    async with pool(steady_bus, 1, engine={"max_running": 1, "hang_after": 0}, limit=limit) as (caller, [engine]):
        pending = []
        for index in range(10):
            pending.append(caller.generate(request_id=f"q{index}"))
            await caller.until(lambda pool, index=index: pool.num_waiting + pool.replicas[0].num_in_flight == index + 1)
        pending[6].cancel()
        await caller.until(lambda pool: pool.num_waiting == 8)
        engine.released.set()
        await asyncio.gather(*(call for index, call in enumerate(pending) if index != 6))
        served = [request.request_id for request in engine.requests if request.request_id != "q6"]
        assert served == [f"q{index}" for index in range(10) if index != 6]
        assert (await caller.replicas()).num_waiting == 0
        assert (await caller.replicas()).replicas[0].num_in_flight == 0


async def test_a_full_wait_queue_rejects_calls(steady_bus: Bus) -> None:
    """RESOURCE_EXHAUSTED names the setting; waiting calls are answered, and then there is room again."""
    async with pool(
        steady_bus, 1, engine={"max_running": 1, "hang_after": 0}, limit={"factor": 1.0}, max_waiting=2
    ) as (
        caller,
        [engine],
    ):
        pending = [asyncio.ensure_future(caller.generate()) for _ in range(3)]
        await caller.until(lambda pool: pool.num_waiting == 2)
        error = await failure(caller.generate())
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "router.max_waiting = 2" in (error.details() or "")
        engine.released.set()
        await asyncio.gather(*pending)
        await caller.generate()


async def test_a_call_waits_for_a_busy_replica_beyond_wait_for_replica_s(steady_bus: Bus) -> None:
    """That is for pools without a usable replica."""
    async with pool(
        steady_bus, 1, engine={"max_running": 1, "delay_s": 1.0}, limit={"factor": 1.0}, wait_for_replica_s=0.2
    ) as (caller, [engine]):
        first = asyncio.ensure_future(caller.generate(timeout_s=60.0))
        await until(lambda: engine.num_calls == 1)
        patient = asyncio.ensure_future(caller.generate(timeout_s=60.0))
        assert list((await first).output_ids) == list((await patient).output_ids)


async def test_a_call_that_cannot_wait_so_long_hears_why_before_its_deadline(steady_bus: Bus) -> None:
    """RESOURCE_EXHAUSTED with the reason, not DEADLINE_EXCEEDED without one."""
    engines = {"max_running": 1, "hang_after": 0}
    async with pool(steady_bus, 1, engine=engines, limit={"factor": 1.0}, time_to_answer_s=HANG_S) as (
        caller,
        [engine],
    ):
        running = asyncio.ensure_future(caller.generate())
        await caller.until(lambda pool: pool.replicas[0].num_in_flight == 1)
        error = await failure(caller.generate(timeout_s=HANG_S + 1.0))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no slot became free in time: the only replica is at the limit of calls" in (error.details() or "")
        engine.released.set()
        await running


async def test_calls_that_wait_for_different_things_do_not_wait_for_each_other(steady_bus: Bus) -> None:
    """One that wants a version that nobody has is passed by those that want less."""
    async with pool(steady_bus, 1, engine={"max_running": 1, "delay_s": 0.05}, wait_for_replica_s=HANG_S) as (
        caller,
        [engine],
    ):
        newest = asyncio.ensure_future(caller.generate("new", version=7))
        await caller.until(lambda pool: pool.num_waiting == 1)
        await asyncio.gather(*(caller.generate() for _ in range(5)))
        assert not newest.done()
        await engine.update(policy_version=7)
        assert (await promptly(newest)).version_spans[0].policy_version == 7


async def test_limits_follow_what_replicas_report(bus: Bus) -> None:
    """A long queue or a full cache halves the limit at once; it comes back step by step while it is used up."""
    limit = {"factor": 1.0, "decrease": 0.5, "increase": 0.25}
    async with pool(bus, 1, engine={"max_running": 8, "delay_s": 0.05}, limit=limit) as (caller, [engine]):
        assert (await caller.replicas()).replicas[0].limit == 8
        await engine.update(num_queued=8, num_running=8)
        await caller.until(lambda pool: pool.replicas[0].limit <= 2)  # the lease is renewed all the while
        await engine.update(num_queued=0, num_running=0)
        most = 0

        async def call() -> None:
            nonlocal most
            await caller.generate()
            most = max(most, (await caller.replicas()).replicas[0].num_in_flight)

        async with asyncio.timeout(HANG_S):
            while (await caller.replicas()).replicas[0].limit < 8:
                await asyncio.gather(*(call() for _ in range(12)))
        assert most <= 8
        await engine.update(kv_use=0.99)
        await caller.until(lambda pool: pool.replicas[0].limit == 1)


async def test_an_engine_that_says_it_is_full_is_left_alone_for_a_moment(steady_bus: Bus) -> None:
    """It is asked a few times per second by all calls together, not by each of them."""
    async with pool(steady_bus, 1, wait_for_replica_s=1.0) as (caller, [engine]):
        engine.error = OverloadedError("queue full")
        errors = await asyncio.gather(*(failure(caller.generate()) for _ in range(50)))
        assert {error.code() for error in errors} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert engine.num_calls < 60  # without it, hundreds
