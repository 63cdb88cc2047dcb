"""Which call gets a slot, which waits for one, and for how long."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.bus.buckets.replica_lease import write_replica
from penstock.errors import OverloadedError, UnavailableError
from penstock.v1 import common_pb2
from services.router.balancing import PoolView, Query, pool_view
from services.router.pool import Pool
from services.router.slots.slot import Slot
from services.router.slots.slot_pool import SlotPool
from services.router.slots.wait_queue import Ticket
from services.router.tuning import LimitTuning, Tuning
from tests.support.router.replica_statuses import Clock, replica, slot_pool
from tests.support.waiting import HANG_S, promptly, settled


@contextlib.asynccontextmanager
async def slots(*, max_running: int = 1, num_replicas: int = 1, **settings) -> AsyncIterator[tuple[SlotPool, Pool]]:
    """The slots of replicas r0, r1, ... that nobody calls."""
    replicas = (replica(f"r{number}", max_running=max_running) for number in range(num_replicas))
    async with slot_pool(*replicas, **settings) as (given, pool, _):
        yield given, pool


@contextlib.asynccontextmanager
async def ticking(pool: Pool) -> AsyncIterator[None]:
    """The pool has news now and then, as it does while a router runs."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.05)  # as leases come
            pool.on_change()

    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        task.cancel()


def ticket(within_s: float = 60.0, *, size_bytes: int = 0) -> Ticket:
    """Of a call that any replica can take."""
    return Ticket(query=Query(), deadline=time.monotonic() + within_s, size_bytes=size_bytes)


async def call_rejected(some: SlotPool, attempts: list[float], *, within_s: float = 60.0) -> None:
    """A call, as the forwarder makes it, to replicas that take a moment to reject it."""
    mine = ticket(within_s)
    while True:
        slot = await some.take(mine)
        attempts.append(time.monotonic())
        await asyncio.sleep(0.01)  # the moment
        mine.last_error = OverloadedError("queue full")
        await slot.fail(mine.last_error, is_prefill=False)
        slot.release()
        mine.query.excluded |= {slot.replica_id}


async def test_calls_that_a_replica_rejects_are_given_up_in_time() -> None:
    """Their wait counts even if the replica was full whenever one of them looked: it was just rejecting another."""
    async with slots(wait_for_replica_s=0.5) as (some, pool), ticking(pool), asyncio.timeout(HANG_S):
        attempts: list[float] = []
        ends = await asyncio.gather(*(call_rejected(some, attempts) for _ in range(30)), return_exceptions=True)
        assert {type(end) for end in ends} == {OverloadedError}
        assert len(attempts) < 15
        assert some.num_waiting == 0


async def test_it_says_how_long_it_served_calls() -> None:
    """The time of a look that finds nothing does not count: there may be thousands of such looks for each call."""
    async with slots() as (some, pool):
        running = await some.take(ticket())
        waiting = asyncio.ensure_future(some.take(ticket()))
        await settled()
        assert pool.on_change() == 0.0
        pool.leases = {**pool.leases, "r1": replica("r1", max_running=1)}
        assert pool.on_change() > 0.0
        running.release()
        (await promptly(waiting)).release()


async def test_waiting_behind_a_busy_replica_is_not_waiting_for_one() -> None:
    """wait_for_replica_s does not pass while a replica is busy, though it rejects others; otherwise it does."""
    clock = Clock()
    async with slots(max_running=4, wait_for_replica_s=0.5, clock=clock) as (some, pool):
        running, mine = [await some.take(ticket()) for _ in range(4)], ticket()
        running[0].settle(OverloadedError("queue full"))
        running.pop(0).release()
        waiting = asyncio.ensure_future(some.take(mine))
        await asyncio.sleep(0)
        clock.now += 0.7
        pool.on_change()
        for slot in running:
            slot.release()
        (await waiting).release()
        assert mine.waited_s == 0.0
        some.replicas["r0"].reject(clock.now, is_overload=False)
        waiting = asyncio.ensure_future(some.take(mine))
        await asyncio.sleep(0)
        clock.now += 0.3
        pool.on_change()
        (await waiting).release()
        assert mine.waited_s == pytest.approx(0.3)


async def test_a_call_that_has_waited_long_enough_is_given_up_whatever_there_is_now() -> None:
    """A replica that rejects everybody is full of the next calls at times: seeing that is no reason to go on."""
    async with slots(wait_for_replica_s=0.5) as (some, _):
        (await some.take(mine := ticket())).release()
        mine.waited_s = 0.5
        other = await some.take(ticket())
        with pytest.raises(OverloadedError, match="no slot became free in time"):
            await some.take(mine)
        other.release()


async def test_who_waits_behind_others_hears_what_they_wait_for() -> None:
    """The replica is well again, and the oldest waiter takes it: to the others it is full, and not away."""
    async with slots() as (some, _):
        some.replicas["r0"].reject(time.monotonic() - 0.15, is_overload=False)
        oldest, hasty = (asyncio.ensure_future(some.take(ticket(within_s))) for within_s in (60.0, 2.0))
        with pytest.raises(OverloadedError, match="the only replica is at the limit of calls"):
            await hasty
        (await oldest).release()


async def test_an_empty_pool_is_waited_for_and_then_given_up() -> None:
    """The error names the remedy; a call that wants what no replica has hears what there is."""
    async with slots(num_replicas=0, wait_for_replica_s=0.1) as (some, _):
        with pytest.raises(UnavailableError, match="no replica is registered"):
            await some.take(ticket())
    async with slots(wait_for_replica_s=0.1) as (some, _):
        with pytest.raises(UnavailableError, match=r"below policy version 7 \(newest 0\)"):
            await some.take(Ticket(query=Query(min_version=7), deadline=time.monotonic() + 60.0))


async def test_no_wait_for_a_replica_is_a_wait_for_a_slot_all_the_same() -> None:
    """wait_for_replica_s = 0 gives up at once without a usable replica; behind a busy one a call waits."""
    async with slots(wait_for_replica_s=0.0) as (some, _), asyncio.timeout(HANG_S):
        running = await some.take(ticket())
        waiting = await waiting_for(some, ticket())
        running.release()
        (await waiting).release()
        with pytest.raises(UnavailableError, match="below policy version 7"):
            await some.take(Ticket(query=Query(min_version=7), deadline=time.monotonic() + 60.0))


async def test_the_wait_queue_is_bounded_in_bytes() -> None:
    """Large requests fill it before many do; what leaves it makes room, and a call that lost a replica always waits."""
    half = 2**19
    async with slots(tuning=Tuning(max_waiting_bytes=2**20)) as (some, _):
        running, lost = await some.take(ticket()), ticket(size_bytes=half)
        lost.order = 1
        waiting = [asyncio.ensure_future(some.take(ticket(size_bytes=half))) for _ in range(2)]
        await asyncio.sleep(0)
        assert some.num_waiting_bytes == 2 * half
        with pytest.raises(OverloadedError, match=r"exceed the 1048576 that may wait; send fewer at once"):
            await some.take(ticket(size_bytes=1))
        waiting.append(asyncio.ensure_future(some.take(lost)))
        await asyncio.sleep(0)
        assert some.num_waiting == 3
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert some.num_waiting_bytes == 0
        running.release()
        (await some.take(ticket(size_bytes=2**30))).release()  # nothing bounds a call that need not wait


def test_a_wait_queue_bounds_bytes_by_default() -> None:
    """512 MiB: a router with 2 GiB of memory survives a full one."""
    assert Tuning().max_waiting_bytes == 512 * 2**20


async def test_a_limit_that_stays_is_no_news() -> None:
    """Hundreds of replicas are looked at in each lease interval, and few limits change."""
    async with slot_pool(replica("a", max_running=4)) as (some, pool, _):
        before = some.view.replicas["a"]
        pool.on_lease_interval()
        assert some.view.replicas["a"] is before


async def test_a_limit_adapts_to_leases() -> None:
    """Once per lease interval, and the view shows it."""
    tuning = Tuning(limit=LimitTuning(factor=2.0, increase=0.5))
    async with slot_pool(replica("a", max_running=4), tuning=tuning) as (some, pool, _):
        taken = [await some.take(ticket()) for _ in range(4)]
        pool.on_lease_interval()
        assert some.view.replicas["a"].max_in_flight == 6
        for slot in taken:
            slot.release()


async def test_a_push_does_not_shrink_a_limit() -> None:
    """While weights change all calls are queued, and the lease may say so for one interval longer; after that, less."""
    ready, updating = common_pb2.REPLICA_STATE_READY, common_pb2.REPLICA_STATE_UPDATING
    limits = []
    async with slot_pool(replica("a", max_running=8), tuning=Tuning(limit=LimitTuning(factor=1.0))) as (
        some,
        pool,
        leases,
    ):
        for state, num_queued in ((updating, 64), (updating, 64), (ready, 64), (ready, 0), (ready, 64)):
            leases.put(replica("a", max_running=8, state=state, queued=num_queued))
            pool.refresh()
            pool.on_change()
            pool.on_lease_interval()
            limits.append(some.view.replicas["a"].max_in_flight)
    assert limits == [8, 8, 8, 8, 5]


def sample(group: str, number: int) -> Ticket:
    """A call of one sample of a group."""
    return Ticket(query=Query(session_id=f"{group}/{number}", group_id=group), deadline=time.monotonic() + 60.0)


async def waiting_for(some: SlotPool, mine: Ticket) -> "asyncio.Future[Slot]":
    """A call that waits for a slot."""
    taking = asyncio.ensure_future(some.take(mine))
    await asyncio.sleep(0)
    assert not taking.done()
    return taking


async def test_a_group_exceeds_its_replicas_limit_and_then_waits_for_it_before_new_groups() -> None:
    """Its prompt is cached there only; the other replica's free slots go to others, and its own to nobody else."""
    async with slots(num_replicas=2, max_running=4) as (some, _), asyncio.timeout(HANG_S):
        held = [await some.take(sample(f"g{number}", 0)) for number in range(8)]
        home = held[0].replica_id
        beyond = [await some.take(sample("g0", number)) for number in (1, 2)]
        assert {slot.replica_id for slot in beyond} == {home}
        new = await waiting_for(some, sample("new", 0))
        follower = await waiting_for(some, sample("g0", 3))
        elsewhere = [slot for slot in held if slot.replica_id != home]
        elsewhere[0].release()
        assert (await new).replica_id != home
        newer = await waiting_for(some, sample("newer", 0))
        beyond[0].release()
        assert (await follower).replica_id == home
        beyond[1].release()
        assert not newer.done()
        elsewhere[1].release()
        await newer
        assert some.num_waiting == 0


async def test_a_group_that_has_begun_does_not_queue_behind_new_ones() -> None:
    """While its replica takes it beyond its limit, it gets its slot at once, and the calls before it wait on."""
    async with slots(num_replicas=2, max_running=4) as (some, _), asyncio.timeout(HANG_S):
        held = [await some.take(sample(f"g{number}", 0)) for number in range(8)]
        new = await waiting_for(some, sample("new", 0))
        follower = await promptly(some.take(sample("g0", 1)))
        assert follower.replica_id == held[0].replica_id
        assert not new.done()
        held[1].release()
        await new


async def test_a_group_does_not_wait_for_a_replica_that_is_gone() -> None:
    """Once its lease has ended, a call that waits for it is one like others: the oldest goes first."""
    async with slot_pool(replica("r0", max_running=4), replica("r1", max_running=4)) as (some, pool, leases):
        async with asyncio.timeout(HANG_S):
            held = [await some.take(sample(f"g{number}", 0)) for number in range(8)]
            home = held[0].replica_id
            elsewhere = [slot for slot in held if slot.replica_id != home]
            for number in (1, 2):
                await some.take(sample("g0", number))
            lost = await waiting_for(some, sample("g0", 3))
            new = await waiting_for(some, sample("new", 0))
            leases.values = {elsewhere[0].replica_id: leases.values[elsewhere[0].replica_id]}
            pool.refresh()
            await settled()
            elsewhere[0].release()
            assert (await lost).replica_id == elsewhere[0].replica_id
            assert not new.done()
            elsewhere[1].release()
            await new


@pytest.mark.parametrize("max_running", [1, 4])
async def test_no_call_waits_for_its_replica_beside_a_free_slot(max_running: int) -> None:
    """The group that has waited longest takes it at once, and more of it follow: its prompt is computed there once."""
    beyond = max_running // 2  # more than it runs at once
    async with slots(num_replicas=2, max_running=max_running) as (some, _), asyncio.timeout(HANG_S):
        held = [await some.take(sample(f"g{number}", 0)) for number in range(2 * max_running)]
        home, other = held[0], held[1]
        assert home.replica_id != other.replica_id
        for number in range(beyond):
            await some.take(sample("g0", 1 + number))
        moving = [await waiting_for(some, sample("g0", 10 + number)) for number in range(1 + beyond)]
        last = await waiting_for(some, sample("g0", 20))
        other.release()
        assert {(await each).replica_id for each in moving} == {other.replica_id}
        assert not last.done()  # both are full now
        home.release()
        assert (await last).replica_id == home.replica_id  # which has its prompt as well


async def test_a_free_slot_goes_to_a_new_group_first() -> None:
    """The prompt of a group that has begun is cached on its own replica; a new one has to be computed anyway."""
    async with slots(num_replicas=2) as (some, _), asyncio.timeout(HANG_S):
        held = [await some.take(sample(f"g{number}", 0)) for number in range(2)]
        begun = await waiting_for(some, sample("g0", 1))
        new = await waiting_for(some, sample("new", 0))
        held[1].release()
        assert (await new).replica_id == held[1].replica_id
        assert not begun.done()
        held[0].release()
        assert (await begun).replica_id == held[0].replica_id


async def test_a_call_that_joins_a_queue_looks_for_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has changed for the others."""
    async with slots(num_replicas=3) as (some, _), asyncio.timeout(HANG_S):
        held = [await some.take(sample(f"g{number}", 0)) for number in range(3)]
        homes: list[str] = []
        find_home = some.balancer.find_home

        def noted(query: Query, pool: PoolView, now: float) -> tuple[str, bool]:
            homes.append(query.session_id)
            return find_home(query, pool, now)

        monkeypatch.setattr(some.balancer, "find_home", noted)
        waiting = []
        for number in range(3):
            homes.clear()
            waiting.append(await waiting_for(some, sample(f"g{number}", 1)))
            assert set(homes) == {f"g{number}/1"}
        for slot, waiter in zip(held, waiting, strict=True):
            slot.release()
            assert (await waiter).replica_id == slot.replica_id


async def test_calls_that_wait_do_not_search_a_full_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call waits for each of many replicas: neither joining nor news of the pool looks at each replica for each call.

    A free slot is found nevertheless.
    """
    num = 40
    async with slots(num_replicas=num) as (some, pool), asyncio.timeout(HANG_S):
        held = [await some.take(sample(f"g{number}", 0)) for number in range(num)]
        num_looks = 0

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def look(*args: Any) -> Any:
                nonlocal num_looks
                num_looks += 1
                return original(*args)

            return look

        for owner, name in ((pool_view, "_is_able"), (PoolView, "_present"), (pool_view, "_find_own_reason")):
            monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
        waiting = [await waiting_for(some, sample(f"g{number}", 1)) for number in range(num)]
        assert num_looks < 10 * num, "of those that joined"
        num_looks = 0
        pool.on_change()
        assert num_looks < 10 * num, "of news"
        for slot, waiter in zip(held, waiting, strict=True):
            slot.release()
            assert (await waiter).replica_id == slot.replica_id
        assert some.num_waiting == 0


async def test_calls_that_wait_share_what_a_change_frees() -> None:
    """Two slots for three calls of equal needs, freed while nobody looks: the oldest two get one each."""
    replicas = [replica(f"r{number}", max_running=1) for number in range(2)]
    async with slot_pool(*replicas) as (some, pool, leases), asyncio.timeout(HANG_S):
        held = [await some.take(ticket()) for _ in range(2)]
        waiting = [await waiting_for(some, ticket()) for _ in range(3)]
        leases.values |= {name: write_replica(replica(name, max_running=1)) for name in ("r2", "r3")}
        pool.refresh()
        assert {(await each).replica_id for each in waiting[:2]} == {"r2", "r3"}
        assert not waiting[2].done()
        held[0].release()
        assert (await waiting[2]).replica_id == held[0].replica_id


async def test_a_call_that_waits_for_one_replica_holds_up_no_other_queue() -> None:
    """Samples that arrive before their group has a replica wait as new calls do, wherever the first of them goes."""
    async with slots(num_replicas=2) as (some, _), asyncio.timeout(HANG_S):
        held = [await some.take(ticket()) for _ in range(2)]
        first, second = [await waiting_for(some, sample("g", number)) for number in range(2)]
        held[0].release()
        await first
        held[1].release()
        assert (await second).replica_id == held[1].replica_id
