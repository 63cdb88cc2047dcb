"""Calls that are given to a second replica when the first is slow to begin."""

import asyncio

import grpc
import pytest

from penstock.bus.connection import Bus
from penstock.errors import UnavailableError
from tests.routers import failure, ids, pool
from tests.waiting import until

SLOW_S = 60.0


async def test_a_slow_replica_is_not_waited_for(bus: Bus) -> None:
    """Another answers, the slow one is told to stop, both places are given back, and the session moves."""
    async with pool(bus, 2, hedge_after_s=0.1) as (caller, [slow, other]):
        assert (await caller.generate("s")).replica_id == "r0"
        slow.delay_s = SLOW_S
        answer = await caller.generate("s", num_tokens=5)
        assert answer.replica_id == "r1"
        assert list(answer.output_ids) == ids(5)
        await until(lambda: slow.num_running == 0)
        assert slow.num_cancelled == 1
        assert [each.num_in_flight for each in (await caller.replicas()).replicas] == [0, 0]
        before = slow.num_calls
        assert (await caller.generate("s")).replica_id == "r1"
        assert slow.num_calls == before
        assert other.num_cancelled == 0


async def test_a_stream_is_hedged_until_it_begins(bus: Bus) -> None:
    """Its tokens are those of one replica; a pause in mid-stream is nobody's call for another."""
    async with pool(bus, 2, engine={"token_s": 0.3}, hedge_after_s=0.5) as (caller, [first, second]):
        chunks = [chunk async for chunk in caller.stream("s", num_tokens=5)]
        assert [token for chunk in chunks for token in chunk.output_ids] == ids(5)
        assert first.num_calls + second.num_calls == 1
        first.delay_s = SLOW_S
        chunks = [chunk async for chunk in caller.stream("s", num_tokens=5)]
        assert [token for chunk in chunks for token in chunk.output_ids] == ids(5)
        assert {chunk.replica_id for chunk in chunks} == {"r1"}


@pytest.mark.parametrize("policy", ["affinity", "prefix"])
async def test_who_began_first_may_still_win(bus: Bus, policy: str) -> None:
    """The second replica is slower yet: it is told to stop, and the session, or prefix, stays where it is."""
    async with pool(bus, 2, engine={"delay_s": 0.4}, hedge_after_s=0.1, policy=policy) as (caller, [first, second]):
        second.delay_s = SLOW_S
        assert (await caller.generate("s", input_ids=[1] * 80)).replica_id == "r0"
        await until(lambda: second.num_cancelled == 1)
        first.delay_s = 0.0
        assert (await caller.generate("s", input_ids=[1] * 80)).replica_id == "r0"
        assert (first.num_answered, second.num_calls) == (2, 1)


async def test_by_default_nobody_else_is_asked(bus: Bus) -> None:
    """A call stays where it is."""
    async with pool(bus, 2, engine={"delay_s": 1.0}) as (caller, [first, second]):
        assert (await caller.generate("s")).replica_id == "r0"
        assert (first.num_calls, second.num_calls) == (1, 0)


async def test_while_somebody_waits_no_place_is_to_spare(bus: Bus) -> None:
    """Whatever he waits for: a pool that is behind has no capacity for seconds."""
    async with pool(bus, 2, hedge_after_s=0.1) as (caller, [first, second]):
        assert (await caller.generate("s")).replica_id == "r0"
        newest = asyncio.ensure_future(caller.generate("t", version=1))
        await caller.until(lambda pool: pool.num_waiting == 1)
        first.delay_s = 0.5
        assert (await caller.generate("s")).replica_id == "r0"
        assert second.num_calls == 0
        await second.update(policy_version=1)
        assert (await newest).replica_id == "r1"


async def test_one_failure_of_two_costs_nothing(bus: Bus) -> None:
    """The second replica fails, the first goes on; and the other way round."""
    async with pool(bus, 2, engine={"delay_s": 0.4}, hedge_after_s=0.1) as (caller, [first, second]):
        second.delay_s, second.error = 0.0, UnavailableError("no")
        assert (await caller.generate("s")).replica_id == "r0"
        assert second.num_calls == 1
        second.delay_s, second.error = 0.8, None
        first.error = UnavailableError("no")
        assert (await caller.generate("s")).replica_id == "r1"


async def test_a_call_that_both_fail_goes_on_to_a_third(bus: Bus) -> None:
    """And where there is none, it fails as any does, with no place kept."""
    async with pool(bus, 3, engine={"delay_s": 0.3}, hedge_after_s=0.1) as (caller, [first, second, third]):
        for engine in (first, second):
            engine.error = UnavailableError("no")
        assert (await caller.generate("s")).replica_id == "r2"
        third.error = UnavailableError("no")
        error = await failure(caller.generate("t"))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert [each.num_in_flight for each in (await caller.replicas()).replicas] == [0, 0, 0]


@pytest.mark.parametrize("policy", ["prefix", "round_robin", "consistent_hash"])
async def test_every_policy_finds_another(bus: Bus, policy: str) -> None:
    """Whoever was chosen first."""
    async with pool(bus, 2, hedge_after_s=0.1, policy=policy) as (caller, engines):
        chosen = (await caller.generate("s", input_ids=[1] * 80)).replica_id
        next_one = "r1" if policy == "round_robin" else chosen
        (slow,) = (each for each in engines if each.replica_id == next_one)
        slow.delay_s = SLOW_S
        assert (await caller.generate("s", input_ids=[1] * 80)).replica_id != next_one
        await until(lambda: slow.num_cancelled == 1)
