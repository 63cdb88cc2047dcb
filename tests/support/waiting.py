"""Waiting for what other tasks and processes do."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

HANG_S = 60.0
"""What takes longer hangs. Deadlines that must not be waited for are far longer."""


async def until(condition: Callable[[], object], timeout_s: float = HANG_S) -> None:
    """Return as soon as `condition` holds; TimeoutError if it does not within `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while True:
            holds = condition()
            if inspect.isawaitable(holds):
                holds = await holds
            if holds:
                return
            await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], object], timeout_s: float = HANG_S) -> None:
    """As `until`, without an event loop; the caller says what is wrong if `condition` does not hold then."""
    ends_at = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < ends_at:
        time.sleep(0.01)


async def settled() -> None:
    """Return when every task has gone as far as it can by itself."""
    for _ in range(50):
        await asyncio.sleep(0)


async def promptly(awaitable: Awaitable[T]) -> T:
    """The result of what waits for no deadline; TimeoutError if it hangs."""
    return await asyncio.wait_for(awaitable, HANG_S)
