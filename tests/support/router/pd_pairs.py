"""A router over pairs of simulated engines, and what should hold of both."""

import contextlib
from collections.abc import AsyncIterator

from penstock.bus.connection import Bus
from penstock.testing.answers import FIRST_ID
from penstock.testing.simulated_pd_pair import SimulatedDecode, SimulatedPeer, SimulatedPrefill
from penstock.v1 import router_pb2
from tests.support.router.routers import Caller, router

CLOSED = router_pb2.BREAKER_STATE_CLOSED


def ids(num_tokens: int) -> list[int]:
    """What a simulated engine answers with."""
    return list(range(FIRST_ID, FIRST_ID + num_tokens))


async def breakers(caller: Caller) -> dict[str, int]:
    return {each.replica.replica_id: each.breaker for each in (await caller.replicas()).replicas}


async def until_idle(caller: Caller) -> None:
    """All slots are given back, and no call waits."""
    await caller.until(lambda pool: not pool.num_waiting and not any(each.num_in_flight for each in pool.replicas))


def assert_well_paired(peers: list[SimulatedPeer]) -> None:
    """No ticket was another's, and nobody waited for a partner in vain."""
    assert not any(peer.num_mismatched for peer in peers if isinstance(peer, SimulatedDecode))
    assert not any(peer.num_timed_out for peer in peers)


@contextlib.asynccontextmanager
async def paired(
    bus: Bus, num_prefill: int, num_decode: int, *, prefill: dict | None = None, decode: dict | None = None, **settings
) -> AsyncIterator[tuple[Caller, list[SimulatedPrefill], list[SimulatedDecode]]]:
    """A router that knows prefill engines p0, p1, ... and decode engines d0, d1, ..."""
    async with contextlib.AsyncExitStack() as stack:
        prefills = [
            await stack.enter_async_context(SimulatedPrefill(bus, replica_id=f"p{n}", **(prefill or {})).running())
            for n in range(num_prefill)
        ]
        decodes = [
            await stack.enter_async_context(SimulatedDecode(bus, replica_id=f"d{n}", **(decode or {})).running())
            for n in range(num_decode)
        ]
        caller = await stack.enter_async_context(router(bus, **settings))
        await caller.until(lambda pool: len(pool.replicas) == num_prefill + num_decode)
        yield caller, prefills, decodes
