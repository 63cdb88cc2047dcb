"""Turns SGLang's cumulative stream, which repeats all tokens in each response, into parts that hold each token once.

Invariant: every token put before `close` is taken exactly once, in order, however the stream ends.
"""

import asyncio
from typing import Any

from services.rollout.engine.sglang.generation import Generation, num_tokens_of, read_generation, require_sound

MAX_WAIT_S = 1.0
"""Maximum seconds that a token waits to be delivered with others, but for long answers. Tokens that still wait are
sampled again if the engine dies. Chunks are most of a stream's cost to router and worker, so a shorter wait would be
dear to callers of many slow streams."""
GROWTH = 16
"""Parts of a long answer grow: a part may hold the tokens before it divided by this, and take the seconds before it
divided by this. An answer of 16,000 tokens is then 63 parts of at least 64 tokens, not 250, and an engine that dies
costs it at most 6%."""


class TokenStream:
    """Queue between one producer, who `put`s SGLang's responses, and one consumer, who `take`s parts."""

    def __init__(self, *, min_tokens: int) -> None:
        """Make parts of at least `min_tokens`; fewer if the first token has waited `MAX_WAIT_S`, or in the last part.

        Of an answer of more than `GROWTH` times as many tokens or seconds, later parts are larger; with `min_tokens` of
        0 or 1, each token is always delivered at once. So is the very first: it ends the prefill, which callers may
        wait for.
        """
        self._min_tokens = max(1, min_tokens)
        self._began: float | None = None
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
        loop = asyncio.get_running_loop()
        if self._began is None:
            self._began = loop.time()
        if self._num_put - self._num_taken >= self._least_tokens:
            self._due.set()
        elif self._num_put > self._num_taken and self._timer is None:
            wait_s = max(MAX_WAIT_S, (loop.time() - self._began) / GROWTH)
            self._timer = loop.call_later(wait_s, self._due.set)

    @property
    def _least_tokens(self) -> int:
        """Tokens of the next part."""
        if not self._num_taken or self._min_tokens == 1:
            return 1
        return max(self._min_tokens, self._num_taken // GROWTH)

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
