"""The two slots of a PD pair are taken together, released once each, and failures are charged to the right peer."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from penstock.clients.stream_attempt import LostReplicaError, UnreachableError
from penstock.errors import NotReadyError, PenstockError, UnavailableError
from penstock.v1 import common_pb2
from services.router.balancing import Query
from services.router.pool import Pool
from services.router.slots.breaker import BreakerState
from services.router.slots.slot_pool import SlotPool
from services.router.slots.wait_queue import Ticket
from services.router.tuning import BreakerTuning, LimitTuning, Tuning
from tests.support.router.replica_statuses import (
    BROKEN,
    DECODE,
    DRAINING,
    PREFILL,
    READY,
    UPDATING,
    Leases,
    breakers,
    replica,
    slot_pool,
)
from tests.support.waiting import promptly


@contextlib.asynccontextmanager
async def slots(*replicas: common_pb2.Replica) -> AsyncIterator[tuple[SlotPool, Pool, Leases]]:
    """With one slot on each replica, and a breaker that opens at once."""
    tuning = Tuning(limit=LimitTuning(factor=1.0), breaker=BreakerTuning(failures=1))
    async with slot_pool(*replicas, tuning=tuning) as given:
        yield given


def peer(replica_id: str, role: int, **fields) -> common_pb2.Replica:
    return replica(replica_id, role=role, max_running=1, **fields)


def ticket(**fields) -> Ticket:
    return Ticket(query=Query(**fields), deadline=time.monotonic() + 30.0)


def in_flight(given: SlotPool) -> dict[str, int]:
    return {name: each.num_in_flight for name, each in sorted(given.replicas.items())}


async def test_a_call_has_both_slots_or_none() -> None:
    """A call that waits for a decode replica keeps no prefill replica from others; a part that is done is free."""
    async with slots(peer("p", PREFILL), peer("d", DECODE), peer("e", DECODE)) as (given, _, _):
        first = await given.take(ticket())
        assert first.prefill is not None
        assert (first.replica_id, first.prefill.replica_id) == ("d", "p")
        second = asyncio.create_task(given.take(ticket()))
        await asyncio.sleep(0)
        assert not second.done()
        assert in_flight(given) == {"d": 1, "e": 0, "p": 1}
        first.prefill.release()
        other = await promptly(second)
        assert other.replica_id == "e"
        third = asyncio.create_task(given.take(ticket()))
        await asyncio.sleep(0)
        assert in_flight(given) == {"d": 1, "e": 1, "p": 1}
        other.release()
        other.release()
        assert in_flight(given) == {"d": 1, "e": 1, "p": 1}  # both are the third's now
        third.cancel()  # at the very moment at which it is served
        with pytest.raises(asyncio.CancelledError):
            await third
        first.release()
        assert in_flight(given) == {"d": 0, "e": 0, "p": 0}


async def test_slots_that_are_split_are_released_one_by_one() -> None:
    """As a client does that calls the peers itself."""
    async with slots(peer("p", PREFILL), peer("d", DECODE)) as (given, _, _):
        slot = await given.take(ticket())
        prefill = slot.split()
        assert prefill is not None
        slot.release()
        assert in_flight(given) == {"d": 0, "p": 1}
        prefill.release()
        assert in_flight(given) == {"d": 0, "p": 0}


@pytest.mark.parametrize("is_prefill", [True, False])
async def test_only_the_culprit_is_blamed(is_prefill: bool) -> None:
    """The failure moves the breaker of one peer."""
    async with slots(peer("p", PREFILL), peer("d", DECODE)) as (given, _, _):
        slot = await given.take(ticket())
        await slot.fail(UnreachableError("gone"), is_prefill=is_prefill)
        slot.release()
        bad, good = ("p", "d") if is_prefill else ("d", "p")
        assert slot.culprit.replica_id == bad
        assert breakers(given) == {bad: BreakerState.OPEN, good: BreakerState.CLOSED}
        assert in_flight(given) == {"d": 0, "p": 0}


@pytest.mark.parametrize(
    ("pushed", "fields", "error", "kind"),
    [
        ("p", {"state": UPDATING}, UnavailableError("aborted"), NotReadyError),
        ("d", {"version": 1}, UnavailableError("aborted"), NotReadyError),
        ("d", {"state": UPDATING}, UnreachableError("gone"), UnreachableError),
        ("d", {"state": UPDATING}, LostReplicaError("frozen"), LostReplicaError),
        ("d", {}, UnavailableError("crashed"), UnavailableError),
    ],
)
async def test_what_a_push_breaks_off_is_no_failure(
    pushed: str, fields: dict, error: PenstockError, kind: type[PenstockError]
) -> None:
    """Of either peer, whichever said so first; its lease may report the push a moment later."""
    roles = {"p": PREFILL, "d": DECODE}
    async with slots(*(peer(name, role) for name, role in roles.items())) as (given, pool, leases):
        slot = await given.take(ticket())
        attributing = asyncio.create_task(slot.attribute(error))
        await asyncio.sleep(0)
        leases.put(peer(pushed, roles[pushed], **fields))
        pool.refresh()
        attributed = await attributing
        assert type(attributed) is kind
        if kind is NotReadyError:
            assert slot.culprit.replica_id == pushed
        slot.release()


@pytest.mark.parametrize(
    ("state", "kind"), [(DRAINING, NotReadyError), (BROKEN, NotReadyError), (READY, UnavailableError)]
)
async def test_calls_that_a_replica_hands_over_are_no_failures(state: int, kind: type[PenstockError]) -> None:
    """Otherwise a rolling restart of three replicas would count as a call that kills replicas."""
    async with slots(replica("u", max_running=1)) as (given, pool, leases):
        slot = await given.take(ticket())
        leases.put(replica("u", max_running=1, state=state))
        pool.refresh()
        assert type(await slot.fail(UnavailableError("handed over"), is_prefill=False)) is kind
        slot.release()
        expected = BreakerState.OPEN if kind is UnavailableError else BreakerState.CLOSED
        assert breakers(given) == {"u": expected}
