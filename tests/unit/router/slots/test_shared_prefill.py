"""Calls of a group with equal prompts wait for the first one's prefill on their replica, and for nothing else."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from penstock.v1 import generate_pb2
from services.router.balancing import Query
from services.router.resumable_stream import read_query
from services.router.slots.shared_prefill import SharedPrefill
from services.router.slots.slot import Slot
from services.router.slots.slot_pool import SlotPool
from services.router.slots.wait_queue import Ticket
from tests.support.router.replica_statuses import DECODE, PREFILL, replica, slot_pool
from tests.support.waiting import HANG_S, promptly


@contextlib.asynccontextmanager
async def slots(*names: str) -> AsyncIterator[SlotPool]:
    async with slot_pool(*(replica(name) for name in names or "a")) as (given, _, _):
        yield given


async def take(given: SlotPool) -> Slot:
    return await given.take(Ticket(query=Query(), deadline=time.monotonic() + HANG_S))


async def entering(shared: SharedPrefill, slot: Slot, prompt: int = 7, timeout_s: float = HANG_S) -> asyncio.Task[None]:
    """A call that has come as far as it can."""
    task = asyncio.create_task(shared.enter(slot, prompt, timeout_s=timeout_s))
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize("ending", ["begin_answer", "release"])
async def test_the_first_goes_at_once_and_the_others_when_it_has_a_token(ending: str) -> None:
    """They do not wait for its end; if it ends without a token, all that waited go at once."""
    shared = SharedPrefill()
    async with slots() as given:
        first, *others = [await take(given) for _ in range(4)]
        await promptly(shared.enter(first, 7, timeout_s=HANG_S))
        waiting = [await entering(shared, slot) for slot in others]
        assert not any(task.done() for task in waiting)
        getattr(first, ending)()
        await promptly(asyncio.gather(*waiting))
        await promptly(shared.enter(await take(given), 7, timeout_s=HANG_S))  # and nobody is in the way of the next
        for slot in (first, *others):
            slot.release()


async def test_others_wait_for_nobody() -> None:
    """Calls on another replica, with another prompt, or without a group."""
    shared = SharedPrefill()
    async with slots("a", "b") as given:
        by_replica: dict[str, list[Slot]] = {}
        for _ in range(4):
            slot = await take(given)
            by_replica.setdefault(slot.replica_id, []).append(slot)
        (first, other, *_), (elsewhere, *_) = by_replica.values()
        await promptly(shared.enter(first, 7, timeout_s=HANG_S))
        await promptly(shared.enter(elsewhere, 7, timeout_s=HANG_S))
        await promptly(shared.enter(other, 8, timeout_s=HANG_S))
        await promptly(shared.enter(other, 0, timeout_s=HANG_S))


async def test_a_cancelled_wait_frees_its_slot_and_a_long_one_ends() -> None:
    """The first call is still the one to wait for."""
    shared = SharedPrefill()
    async with slots() as given:
        first = await take(given)
        await shared.enter(first, 7, timeout_s=HANG_S)
        waiting = await entering(shared, await take(given))
        assert given.replicas["a"].num_in_flight == 2
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert given.replicas["a"].num_in_flight == 1
        await promptly(shared.enter(await take(given), 7, timeout_s=0.01))
        still = await entering(shared, await take(given))
        assert not still.done()
        first.begin_answer()
        await promptly(still)


async def test_a_pair_shares_the_prefill_of_its_prefill_replica() -> None:
    """Whichever replica decodes."""
    shared = SharedPrefill()
    async with slot_pool(replica("p", role=PREFILL), replica("d", role=DECODE), replica("e", role=DECODE)) as (
        given,
        _,
        _,
    ):
        first, second = await take(given), await take(given)
        assert {first.replica_id, second.replica_id} == {"d", "e"}
        await shared.enter(first, 7, timeout_s=HANG_S)
        waiting = await entering(shared, second)
        assert not waiting.done()
        first.begin_answer()
        await promptly(waiting)


def test_prompts_are_shared_by_group_ids_and_images() -> None:
    """Whatever else the calls differ in."""

    def shared(group: str = "g", ids: tuple[int, ...] = (1, 2), image: bytes = b"x", **fields: str) -> int:
        request = generate_pb2.GenerateRequest(group_id=group, input_ids=ids, **fields)
        request.images.add(data=image)
        request.sampling.max_new_tokens = 1
        return read_query(request.SerializeToString(), with_blocks=False).shared_prompt

    assert shared(session_id="s", request_id="q") == shared(session_id="t", request_id="r") != 0
    assert len({shared(), shared("h"), shared(ids=(1, 3)), shared(image=b"y")}) == 4
    assert shared("") == 0
