"""Who gets a place, who waits for one, and for how long."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from penstock.bus.replica_lease import write_replica
from penstock.errors import OverloadedError, UnavailableError
from penstock.runtime.security import Security
from penstock.v1 import common_pb2
from services.router.balancing import Query, ReplicaStatus
from services.router.config import RouterConfig
from services.router.pool import Pool
from services.router.slot_pool import SlotPool
from services.router.wait_queue import Ticket


@contextlib.asynccontextmanager
async def places(
    *, max_running: int = 1, num_replicas: int = 1, **settings
) -> AsyncIterator[tuple[SlotPool, ReplicaStatus | None]]:
    """Those of replicas r0, r1, ... that nobody asks anything, and r0 if there is one."""
    leases = {
        f"r{number}": write_replica(
            common_pb2.Replica(
                replica_id=f"r{number}",
                address="127.0.0.1:1",
                role=common_pb2.REPLICA_ROLE_UNIFIED,
                state=common_pb2.REPLICA_STATE_READY,
                max_running=max_running,
            )
        )
        for number in range(num_replicas)
    }
    config = RouterConfig(**settings)
    pool = Pool(config, SimpleNamespace(values=leases), SimpleNamespace(values={}), Security())
    pool._refresh()
    yield SlotPool(config, pool), pool.candidates.get("r0")
    await pool._close()


@contextlib.asynccontextmanager
async def ticking(places: SlotPool) -> AsyncIterator[None]:
    """The pool has news now and then, as it does while a router runs."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.05)
            places._pool.on_change()

    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        task.cancel()


def ticket(within_s: float = 60.0) -> Ticket:
    """Of a call that anybody may take."""
    return Ticket(query=Query(), deadline=time.monotonic() + within_s)


async def play_refused(places: SlotPool, tries: list[float], *, within_s: float = 60.0) -> None:
    """A call, as the proxy makes it, of replicas that take a moment to turn it away."""
    mine = ticket(within_s)
    while True:
        place = await places.take(mine)
        tries.append(time.monotonic())
        with contextlib.suppress(OverloadedError), place:
            await asyncio.sleep(0.01)
            mine.last_error = OverloadedError("queue full")
            raise mine.last_error
        mine.query.excluded |= {place.member.candidate.replica_id}


async def test_calls_that_a_replica_turns_away_are_given_up_in_time() -> None:
    """Their wait counts though whenever one of them looked the replica was full: another was just being turned away."""
    async with places(wait_for_replica_s=0.5) as (some, _), ticking(some), asyncio.timeout(4.0):
        tries: list[float] = []
        ends = await asyncio.gather(*(play_refused(some, tries) for _ in range(30)), return_exceptions=True)
        assert {type(end) for end in ends} == {OverloadedError}
        assert len(tries) < 15
        assert some.num_waiting == 0


async def test_only_waiting_for_a_replica_that_works_is_no_waiting_for_replicas() -> None:
    """wait_for_replica_s does not pass while somebody is busy, though it turns others away; otherwise it does."""
    async with places(max_running=4, wait_for_replica_s=0.5) as (some, busy), ticking(some):
        running, mine = [await some.take(ticket()) for _ in range(4)], ticket()
        running[0].settle(OverloadedError("queue full"))
        running.pop(0).give_back()
        waiting = asyncio.ensure_future(some.take(mine))
        await asyncio.sleep(0.7)
        for place in running:
            place.give_back()
        (await waiting).give_back()
        assert mine.waited_s == 0.0
        busy.refusing_until = time.monotonic() + 0.3
        (await some.take(mine)).give_back()
        assert mine.waited_s > 0.2


async def test_a_call_that_has_waited_long_enough_is_given_up_whatever_there_is_now() -> None:
    """A replica that turns everybody away is full of the next ones at times: to see that is no reason to go on."""
    async with places(wait_for_replica_s=0.5) as (some, _):
        (await some.take(mine := ticket())).give_back()
        mine.waited_s = 0.5
        with await some.take(ticket()), pytest.raises(OverloadedError, match="no place became free in time"):
            await some.take(mine)


async def test_who_waits_behind_others_hears_what_they_wait_for() -> None:
    """The replica is well again, and the oldest in line takes it: to the others it is full, and not away."""
    async with places() as (some, refusing):
        refusing.refusing_until = time.monotonic() + 0.1
        oldest, hasty = (asyncio.ensure_future(some.take(ticket(within_s))) for within_s in (60.0, 0.4))
        with pytest.raises(OverloadedError, match="the only replica is at the limit of calls"):
            await hasty
        (await oldest).give_back()


async def test_an_empty_pool_is_waited_for_and_then_given_up() -> None:
    """With what to do about it; a call that wants what nobody has hears what there is."""
    async with places(num_replicas=0, wait_for_replica_s=0.1) as (some, _):
        with pytest.raises(UnavailableError, match="no replica is registered"):
            await some.take(ticket())
    async with places(wait_for_replica_s=0.1) as (some, _):
        with pytest.raises(UnavailableError, match=r"below policy version 7 \(newest 0\)"):
            await some.take(Ticket(query=Query(min_version=7), deadline=time.monotonic() + 60.0))
