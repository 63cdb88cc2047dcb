"""Shares one prompt among the samples of a group: it is rendered once and computed once by the engine, whose prefix
cache serves the other samples.

Samples that begin together would each compute the prompt, images included, because a prompt is in the cache only when
its prefill is over. `GenerateRequest.group_id` brings them to the same replica.

Invariants: no sample waits for one that has its first token, or that ended without one. A sample whose environment
begins with another observation gets its own rendering.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from penstock.environments import Observation


class SharedPrefill:
    """Orders the first turns of the samples of one group."""

    def __init__(self) -> None:
        """Start before any sample has begun."""
        self._has_begun = False
        self._is_over = asyncio.Event()
        self._rendering = asyncio.Lock()
        self._rendered: tuple[Observation, list[int]] | None = None

    async def ids_of(self, first: Observation, render: Callable[[], Awaitable[list[int]]]) -> list[int]:
        """Return the ids of a sample's first observation; `render` makes them unless an earlier sample did."""
        async with self._rendering:
            if self._rendered is None or self._rendered[0] != first:
                self._rendered = first, await render()
            return list(self._rendered[1])

    @asynccontextmanager
    async def first_turn(self) -> AsyncIterator[Callable[[], None]]:
        """Enter to play a first turn: at once for the first caller, after its prefill for the others.

        Yields a function that the caller must call when the turn has its first token.
        """
        if self._has_begun:
            await self._is_over.wait()
        self._has_begun = True
        try:
            yield self._is_over.set
        finally:
            self._is_over.set()
