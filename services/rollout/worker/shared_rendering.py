"""Renders a group's prompt once for all its samples.

A sample whose environment begins with another observation gets its own rendering.
"""

import asyncio
from collections.abc import Awaitable, Callable

from penstock.environments import Observation


class SharedRendering:
    """The rendered prompt of one group."""

    def __init__(self) -> None:
        """Start before any sample has begun."""
        self._rendering = asyncio.Lock()
        self._rendered: tuple[Observation, list[int]] | None = None

    async def ids_of(self, first: Observation, render: Callable[[], Awaitable[list[int]]]) -> list[int]:
        """Return the ids of a sample's first observation; `render` makes them unless an earlier sample did."""
        async with self._rendering:
            if self._rendered is None or self._rendered[0] != first:
                self._rendered = first, await render()
            return list(self._rendered[1])
