"""A task that runs beside the body of a context, and ends it by its error."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from structlog.testing import capture_logs

from penstock.runtime.process import beside


async def fail() -> None:
    """What runs beside the body."""
    raise ConnectionError("gone")


async def for_ever() -> None:
    """A body that is ended."""
    await asyncio.Event().wait()


async def for_a_moment() -> None:
    """A body that ends when the other has failed, and nobody has been told."""
    await asyncio.sleep(0)


async def with_an_error_of_its_own() -> None:
    """A body that makes something else of its end."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise ValueError("own") from None


async def play(body: Callable[[], Awaitable[None]]) -> None:
    """The body in the context."""
    async with beside(fail()):
        await body()


@pytest.mark.parametrize("body", [for_ever, for_a_moment])
async def test_its_error_takes_the_place_of_the_body_s_end(body: Callable[[], Awaitable[None]]) -> None:
    """Also if both end in the same moment; and the task may go on."""
    with pytest.raises(ConnectionError, match="gone"):
        await play(body)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_body_s_own_error_hides_it_from_nobody() -> None:
    """The log says why the body ended."""
    with capture_logs() as lines, pytest.raises(ValueError, match="own"):
        await play(with_an_error_of_its_own)
    assert [line["error"] for line in lines] == ["ConnectionError('gone')"]


async def test_an_orderly_end_ends_it() -> None:
    """Whatever it does when it is cancelled."""

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ConnectionError("not now")

    async with beside(stubborn()):
        await asyncio.sleep(0)
