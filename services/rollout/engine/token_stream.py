"""Turns SGLang's cumulative stream, which repeats all tokens in each response, into parts that hold each token once.

Invariant: every token put before `close` is taken exactly once, in order, however the stream ends.
"""

import asyncio
from typing import Any

from services.rollout.engine.generation import Generation, num_tokens_of, read_generation, require_sound

MAX_WAIT_S = 1.0
"""Maximum seconds that a token waits to be delivered with others. Tokens that still wait are sampled again if the
engine dies. Chunks are most of a stream's cost to router and worker, so a shorter wait would be dear to callers of many
slow streams."""


class TokenStream:
    """Queue between one producer, who `put`s SGLang's responses, and one consumer, who `take`s parts."""

    def __init__(self, *, min_tokens: int) -> None:
        """Make parts of at least `min_tokens`; fewer if the first token has waited `MAX_WAIT_S`, or in the last part.

        The very first token is delivered at once: it ends the prefill, which callers may wait for.
        """
        self._min_tokens = max(1, min_tokens)
        self._last: dict[str, Any] | None = None
        self._num_put = 0
        self._num_taken = 0
        self._closed = False
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def put(self, response: dict[str, Any]) -> None:
        """Store a response, which holds all tokens so far.

        Raises:
            InvalidRequestError: SGLang refuses the request.
            UnavailableError: SGLang gave the request up.
        """
        require_sound(response)
        self._last, self._num_put = response, num_tokens_of(response)
        if self._num_put - self._num_taken >= (self._min_tokens if self._num_taken else 1):
            self._due.set()
        elif self._num_put > self._num_taken and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MAX_WAIT_S, self._due.set)

    def close(self) -> None:
        """End the stream."""
        self._closed = True
        self._due.set()

    async def take(self) -> Generation | None:
        """Wait for the next part and return it; return None once the stream is closed and all tokens are taken."""
        await self._due.wait()
        if not self._closed:
            self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._last is None or self._num_put == self._num_taken:
            return None
        part = read_generation(self._last, first=self._num_taken)
        self._num_taken = part.num_tokens_so_far
        return part
