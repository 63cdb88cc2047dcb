"""Waiting for what other tasks and processes do."""

import asyncio
import inspect
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


async def promptly(awaitable: Awaitable[T]) -> T:
    """The result of what waits for no deadline; TimeoutError if it hangs."""
    return await asyncio.wait_for(awaitable, HANG_S)
