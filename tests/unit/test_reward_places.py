"""The bound on the items in the service."""

import asyncio
import contextlib

import pytest

from penstock.errors import InvalidRequestError, OverloadedError
from services.reward.places import Places


def test_who_brings_more_than_is_left_is_refused() -> None:
    """And told how many there are; what is left can still be taken."""
    places = Places(10)
    with places.taken(7):
        with pytest.raises(OverloadedError, match=r"holds 7 of 10 items and 4 more do not fit; .* reward.max_queue"):
            places.taken(4).__enter__()
        with places.taken(3):
            assert places.num_taken == 10
    assert places.num_taken == 0


async def test_who_brings_more_than_there_are_is_refused_for_good() -> None:
    """Waiting would not help."""
    places = Places(10)
    with pytest.raises(InvalidRequestError, match="11 items are more than the queue holds; send at most 10"):
        places.taken(11).__enter__()
    with pytest.raises(InvalidRequestError):
        await places.taken_when_free(11).__aenter__()


async def test_waiters_have_their_turn_in_order() -> None:
    """A large one is not overtaken by small ones, neither those that wait nor those that do not."""
    places, order = Places(10), []

    async def wait(num_items: int) -> None:
        async with places.taken_when_free(num_items):
            order.append(num_items)
            await asyncio.sleep(0)

    with places.taken(5):
        waiting = [asyncio.create_task(wait(num_items)) for num_items in (9, 1, 2)]
        await asyncio.sleep(0)
        assert order == []
        with pytest.raises(OverloadedError):
            places.taken(1).__enter__()
    await asyncio.gather(*waiting)
    assert order == [9, 1, 2]
    assert places.num_taken == 0


async def test_a_place_that_comes_free_as_its_waiter_is_cancelled_goes_to_the_next() -> None:
    """The one who frees it is not troubled, and nothing is lost."""
    places = Places(10)

    async def wait(num_items: int) -> None:
        async with places.taken_when_free(num_items):
            pass

    with places.taken(5):
        leaving = asyncio.create_task(wait(8))
        behind = asyncio.create_task(wait(7))
        await asyncio.sleep(0)
        leaving.cancel()
    await asyncio.wait_for(behind, 5)
    assert leaving.cancelled()
    assert places.num_taken == 0


@pytest.mark.parametrize("its_turn_came", [False, True])
async def test_a_waiter_that_is_cancelled_holds_nothing(its_turn_came: bool) -> None:
    """Even if its turn comes at that moment; who waited behind it goes on."""
    places = Places(10)

    async def wait(num_items: int) -> None:
        async with places.taken_when_free(num_items):
            pass

    with contextlib.ExitStack() as stack:
        stack.enter_context(places.taken(5))
        leaving = asyncio.create_task(wait(8))
        behind = asyncio.create_task(wait(2))
        await asyncio.sleep(0)
        if its_turn_came:
            stack.close()
        leaving.cancel()
        await asyncio.wait((leaving,))
        await asyncio.wait_for(behind, 5)
    assert places.num_taken == 0
