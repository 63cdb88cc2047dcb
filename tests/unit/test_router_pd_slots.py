"""The two places of a pair are taken together, given back each once, and what fails is learnt of the right half."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from penstock.bus.replica_lease import write_replica
from penstock.clients.stream_attempt import UnreachableError
from penstock.errors import NotReadyError, PenstockError, UnavailableError
from penstock.runtime.security import Security
from penstock.v1 import common_pb2
from services.router.balancing import Query
from services.router.breaker import BreakerState
from services.router.config import RouterConfig
from services.router.pool import Pool
from services.router.slot_pool import SlotPool
from services.router.wait_queue import Ticket
from tests.replica_statuses import DECODE, PREFILL, UPDATING, replica


def described(replica_id: str, role: int, **fields) -> common_pb2.Replica:
    described = replica(replica_id, role=role, max_running=1, **fields)
    described.address = "127.0.0.1:1"
    return described


@contextlib.asynccontextmanager
async def places(*replicas: common_pb2.Replica) -> AsyncIterator[tuple[SlotPool, Pool]]:
    """With one place at each replica, and a breaker that opens at once."""
    leases = SimpleNamespace(values={each.replica_id: write_replica(each) for each in replicas})
    config = RouterConfig(limit={"factor": 1.0}, breaker={"failures": 1})
    pool = Pool(config, leases, SimpleNamespace(values={}), Security())
    pool._refresh()
    yield SlotPool(config, pool), pool
    await pool._close()


def ticket(**fields) -> Ticket:
    return Ticket(query=Query(**fields), deadline=time.monotonic() + 30.0)


def in_flight(pool: Pool) -> dict[str, int]:
    return {name: candidate.num_in_flight for name, candidate in sorted(pool.candidates.items())}


async def test_a_call_has_both_places_or_none() -> None:
    """Who waits for a decode replica keeps no prefill replica from others; a part that is done is free for the next."""
    async with places(described("p", PREFILL), described("d", DECODE), described("e", DECODE)) as (given, pool):
        first = await given.take(ticket())
        assert first.prefill is not None
        assert (first.member.candidate.replica_id, first.prefill.member.candidate.replica_id) == ("d", "p")
        second = asyncio.create_task(given.take(ticket()))
        await asyncio.sleep(0.05)
        assert not second.done()
        assert in_flight(pool) == {"d": 1, "e": 0, "p": 1}
        first.prefill.give_back()
        other = await asyncio.wait_for(second, 5.0)
        assert other.member.candidate.replica_id == "e"
        third = asyncio.create_task(given.take(ticket()))
        await asyncio.sleep(0.05)
        assert in_flight(pool) == {"d": 1, "e": 1, "p": 1}
        other.give_back()
        other.give_back()
        assert in_flight(pool) == {"d": 1, "e": 1, "p": 1}  # both are the third's now
        third.cancel()  # in the very moment in which it is served
        with pytest.raises(asyncio.CancelledError):
            await third
        first.give_back()
        assert in_flight(pool) == {"d": 0, "e": 0, "p": 0}


async def test_places_that_are_split_are_given_back_one_by_one() -> None:
    """As a client that talks to the halves itself does."""
    async with places(described("p", PREFILL), described("d", DECODE)) as (given, pool):
        place = await given.take(ticket())
        prefill = place.split()
        assert prefill is not None
        place.give_back()
        assert in_flight(pool) == {"d": 0, "p": 1}
        prefill.give_back()
        assert in_flight(pool) == {"d": 0, "p": 0}


@pytest.mark.parametrize("by_prefill", [True, False])
async def test_only_the_culprit_is_blamed(by_prefill: bool) -> None:
    """The error that leaves the place moves the breaker of one half."""
    async with places(described("p", PREFILL), described("d", DECODE)) as (given, pool):
        place = await given.take(ticket())
        assert place.prefill is not None
        place.culprit = place.prefill if by_prefill else place
        with pytest.raises(UnreachableError), place:
            raise UnreachableError("gone")
        states = {name: candidate.breaker.state for name, candidate in pool.candidates.items()}
        expected = {"p": BreakerState.OPEN, "d": BreakerState.CLOSED} if by_prefill else {}
        assert states == (expected or {"p": BreakerState.CLOSED, "d": BreakerState.OPEN})
        assert in_flight(pool) == {"d": 0, "p": 0}


@pytest.mark.parametrize(
    ("pushed", "fields", "error", "kind"),
    [
        ("p", {"state": UPDATING}, UnavailableError("aborted"), NotReadyError),
        ("d", {"version": 1}, UnavailableError("aborted"), NotReadyError),
        ("d", {"state": UPDATING}, UnreachableError("gone"), UnreachableError),
        ("d", {}, UnavailableError("crashed"), UnavailableError),
    ],
)
async def test_what_a_push_breaks_off_is_no_failure(
    pushed: str, fields: dict, error: PenstockError, kind: type[PenstockError]
) -> None:
    """Of either half, whichever of them said so first; its lease may tell of the push a moment later."""
    roles = {"p": PREFILL, "d": DECODE}
    async with places(*(described(name, role) for name, role in roles.items())) as (given, pool):
        place = await given.take(ticket())
        judging = asyncio.create_task(place.judge(error))
        await asyncio.sleep(0.02)
        pool.candidates[pushed].update(described(pushed, roles[pushed], **fields))
        judged = await judging
        assert type(judged) is kind
        if kind is NotReadyError:
            assert place.culprit.member.candidate.replica_id == pushed
        place.give_back()
