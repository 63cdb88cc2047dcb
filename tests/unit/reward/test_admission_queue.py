"""The bound on the items in the service."""

import asyncio
import contextlib

import pytest

from penstock.errors import InvalidRequestError, OverloadedError
from services.reward.admission_queue import AdmissionQueue
from tests.support.waiting import promptly


def test_who_brings_more_than_is_left_is_refused() -> None:
    """And told how many there are; what is left can still be taken."""
    queue = AdmissionQueue(10)
    with queue.admitted(7):
        with pytest.raises(OverloadedError, match=r"holds 7 of 10 items and 4 more do not fit; .* start another"):
            queue.admitted(4).__enter__()
        with queue.admitted(3):
            assert queue.num_admitted == 10
    assert queue.num_admitted == 0


async def test_who_brings_more_than_there_are_is_refused_for_good() -> None:
    """Waiting would not help."""
    queue = AdmissionQueue(10)
    with pytest.raises(InvalidRequestError, match="11 items are more than the queue holds; send at most 10"):
        queue.admitted(11).__enter__()
    with pytest.raises(InvalidRequestError):
        await queue.admitted_in_turn(11).__aenter__()


async def test_waiters_have_their_turn_in_order() -> None:
    """A large one is not overtaken by small ones, neither those that wait nor those that do not."""
    queue, order = AdmissionQueue(10), []

    async def wait(num_items: int) -> None:
        async with queue.admitted_in_turn(num_items):
            order.append(num_items)
            await asyncio.sleep(0)

    with queue.admitted(5):
        waiting = [asyncio.create_task(wait(num_items)) for num_items in (9, 1, 2)]
        await asyncio.sleep(0)
        assert order == []
        with pytest.raises(OverloadedError):
            queue.admitted(1).__enter__()
    await asyncio.gather(*waiting)
    assert order == [9, 1, 2]
    assert queue.num_admitted == 0


async def test_a_place_that_comes_free_as_its_waiter_is_cancelled_goes_to_the_next() -> None:
    """The one who frees it is not troubled, and nothing is lost."""
    queue = AdmissionQueue(10)

    async def wait(num_items: int) -> None:
        async with queue.admitted_in_turn(num_items):
            pass

    with queue.admitted(5):
        leaving = asyncio.create_task(wait(8))
        behind = asyncio.create_task(wait(7))
        await asyncio.sleep(0)
        leaving.cancel()
    await promptly(behind)
    assert leaving.cancelled()
    assert queue.num_admitted == 0


@pytest.mark.parametrize("its_turn_came", [False, True])
async def test_a_waiter_that_is_cancelled_holds_nothing(its_turn_came: bool) -> None:
    """Even if its turn comes at that moment; who waited behind it goes on."""
    queue = AdmissionQueue(10)

    async def wait(num_items: int) -> None:
        async with queue.admitted_in_turn(num_items):
            pass

    with contextlib.ExitStack() as stack:
        stack.enter_context(queue.admitted(5))
        leaving = asyncio.create_task(wait(8))
        behind = asyncio.create_task(wait(2))
        await asyncio.sleep(0)
        if its_turn_came:
            stack.close()
        leaving.cancel()
        await asyncio.wait((leaving,))
        await promptly(behind)
    assert queue.num_admitted == 0
