"""What is closed beside a group's delivery."""

import asyncio
from collections.abc import Callable

import pytest

from penstock.errors import UnavailableError
from services.rollout.worker.closings import Closings
from tests.support.waiting import promptly, settled


class Resource:
    """Tells 3, unless it may not yet, and is closed when it may be."""

    def __init__(self) -> None:
        self.may_tell, self.may_close = asyncio.Event(), asyncio.Event()
        self.may_tell.set()
        self.is_closing, self.is_closed = False, False

    async def play(self, tell: Callable[[int], None]) -> None:
        """What has a result."""
        try:
            await self.may_tell.wait()
            tell(3)
        finally:
            await self.close()

    async def close(self) -> None:
        """What is closed."""
        self.is_closing = True
        await self.may_close.wait()
        self.is_closed = True


async def test_a_result_does_not_wait_for_what_is_closed_after_it() -> None:
    """The context does."""
    resource = Resource()
    async with Closings() as closings:
        assert await promptly(closings.result_of(resource.play)) == 3
        assert not resource.is_closed
        resource.may_close.set()
    assert resource.is_closed


async def test_what_fails_in_place_of_a_result_is_raised() -> None:
    """As if it had been awaited."""

    async def fail(tell: Callable[[int], None]) -> None:
        raise UnavailableError("no replica")

    async with Closings() as closings:
        with pytest.raises(UnavailableError, match="no replica"):
            await closings.result_of(fail)


async def test_what_is_cancelled_before_its_result_is_closed_whole() -> None:
    """The caller learns of it at once, and the context waits."""
    resource = Resource()
    resource.may_tell.clear()
    async with Closings() as closings:
        playing = asyncio.create_task(closings.result_of(resource.play))
        await settled()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await promptly(playing)
        await settled()
        assert resource.is_closing
        assert not resource.is_closed
        resource.may_close.set()
    assert resource.is_closed


async def hold(closings: Closings, body: asyncio.Event) -> None:
    """The context of a group, until `body`."""
    async with closings:
        await body.wait()


async def test_a_group_that_is_cancelled_lets_what_is_being_closed_end() -> None:
    """A worker that stops has time for that."""
    resource, closings = Resource(), Closings()
    group = asyncio.create_task(hold(closings, asyncio.Event()))
    closings.begin(resource.close())
    await settled()
    group.cancel()
    await settled()
    assert not group.done()
    resource.may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await promptly(group)
    assert resource.is_closed


async def test_a_cancelled_wait_cuts_off_what_is_being_closed_and_leaves_nothing_behind() -> None:
    """Not before it has ended."""
    resource, closings, body, ended = Resource(), Closings(), asyncio.Event(), list[bool]()
    body.set()

    async def close() -> None:
        try:
            await resource.close()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    closings.begin(close())
    group = asyncio.create_task(hold(closings, body))
    await settled()
    assert resource.is_closing
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await promptly(group)
    assert ended == [True]
    assert not resource.is_closed


async def test_what_fails_while_it_is_closed_fails_no_group() -> None:
    """Its result is known."""

    async def fail() -> None:
        raise ValueError("of its own")

    async with Closings() as closings:
        closing = closings.begin(fail())
    assert isinstance(closing.exception(), ValueError)
