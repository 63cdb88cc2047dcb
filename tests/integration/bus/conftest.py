"""The workers' consumer."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from penstock.bus.connection import Bus
from penstock.bus.work_queue.consumer import Consumer, consuming
from tests.support.bus.work_queue import OpenConsumer


@pytest.fixture
async def workers() -> AsyncIterator[OpenConsumer]:
    """What opens the workers' consumer; all of them end with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_one(bus: Bus, *, ack_wait_s: float = 1.0, fresh: bool = False) -> Consumer:
            opening = consuming(bus, bus.prompts, "workers", ack_wait_s=ack_wait_s, max_ack_pending=100, fresh=fresh)
            return await stack.enter_async_context(opening)

        yield open_one
