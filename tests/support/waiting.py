"""Waiting for what other tasks and processes do."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Return as soon as `condition` holds; TimeoutError if it does not within `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
