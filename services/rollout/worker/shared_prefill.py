"""One prefill for the samples of a group: the first computes the prompt, the others find it in the prefix cache.

Samples that begin together would each compute the prompt, images included, because a prompt is in the cache only when
its prefill is over. `GenerateRequest.group_id` brings them to the same replica.

Invariant: nobody waits for a sample that has its first token, or that ended without one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class SharedPrefill:
    """Orders the first turns of the samples of one group."""

    def __init__(self) -> None:
        """No sample has begun."""
        self._has_begun = False
        self._is_over = asyncio.Event()

    @asynccontextmanager
    async def first_turn(self) -> AsyncIterator[Callable[[], None]]:
        """Enter to play a first turn: at once for the first caller, after its prefill for the others.

        Yields what the caller must call when the turn has its first token.
        """
        if self._has_begun:
            await self._is_over.wait()
        self._has_begun = True
        try:
            yield self._is_over.set
        finally:
            self._is_over.set()
