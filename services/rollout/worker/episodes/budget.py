"""The remaining budget of an episode: tokens, observations, images, pixels.

Invariants: an observation that does not fit is refused before anything is spent on it: pixels are read from headers,
text is measured in bytes before it is tokenised, and the tokens of images are computed, not asked for. An observation
is taken whole or not at all.
"""

import json
import math
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from penstock.environments import Observation
from penstock.errors import TooManyPixelsError
from penstock.model.families.qwen_vl import ImageGrid
from penstock.model.images import MAX_PIXELS, read_sizes
from penstock.records import Limits, TextPart

Render: TypeAlias = Callable[[int], Awaitable[list[int]]]
"""Makes the ids of an observation, whose text has the given number of bytes."""

MIN_ROOM_TOKENS = 16
"""A later turn is played only if there is room for this many tokens; engines reserve a few of them."""


class OverBudgetError(Exception):
    """An observation does not fit; the message names the exceeded limit."""


class Budget:
    """The budget of one episode."""

    def __init__(
        self, limits: Limits, *, context_length: int | None, grid: ImageGrid | None, longest_token_bytes: int
    ) -> None:
        """Begin with the whole budget.

        Args:
            limits: The prompt's limits.
            context_length: Maximum tokens of a sequence, images expanded; None for no limit.
            grid: How the model cuts images into tokens; None for a model without images.
            longest_token_bytes: Bytes of text of the longest token.
        """
        self._limits = limits
        self._context_length = context_length
        self._grid = grid
        self._longest_token_bytes = longest_token_bytes
        self._num_tokens = 0
        self._num_observation_tokens = 0
        self._num_images = 0
        self._num_pixels = 0

    async def add_prompt(self, observation: Observation, render: Render) -> list[int]:
        """Take the first observation, and return its ids, which `render` makes.

        Raises:
            OverBudgetError: it leaves no room for a token.
            InvalidRequestError: an image cannot be read.
        """
        return await self._add(observation, render, self._room(reserved=1))

    async def add_observation(self, observation: Observation, render: Render) -> list[int]:
        """Take a later observation, and return its ids, which `render` makes.

        Raises:
            OverBudgetError: it does not fit, or leaves no room for another turn.
            InvalidRequestError: an image cannot be read.
        """
        before, room = self._num_tokens, self._room(reserved=MIN_ROOM_TOKENS)
        if self._limits.max_observation_tokens is not None:
            left = self._limits.max_observation_tokens - self._num_observation_tokens
            room = min(room, (left, "max_observation_tokens"))
        ids = await self._add(observation, render, room)
        self._num_observation_tokens += self._num_tokens - before
        return ids

    def add_turn(self, num_context_tokens: int) -> None:
        """Note the number of tokens that the engine holds after a turn, images expanded."""
        self._num_tokens = num_context_tokens

    def leave_out(self, num_tokens: int) -> None:
        """Note that the next turn's context has `num_tokens` fewer."""
        self._num_tokens -= num_tokens

    def max_new_tokens(self, wanted: int) -> int:
        """Return the maximum tokens of the next turn: `wanted`, or the rest of the row's own limit."""
        return wanted if self._limits.max_tokens is None else min(wanted, self._limits.max_tokens - self._num_tokens)

    def _room(self, *, reserved: int) -> tuple[float, str]:
        """Return the tokens that an observation may have, and the limit's name; `reserved` are left for the turn."""
        bounds = ((self._context_length, "the context"), (self._limits.max_tokens, "max_tokens"))
        return min(
            ((bound - self._num_tokens - reserved, name) for bound, name in bounds if bound is not None),
            default=(math.inf, ""),
        )

    async def _add(self, observation: Observation, render: Render, room: tuple[float, str]) -> list[int]:
        try:
            sizes = read_sizes(observation.images)
        except TooManyPixelsError as error:
            raise OverBudgetError(str(error)) from None
        num_images = self._num_images + len(sizes)
        num_pixels = self._num_pixels + sum(width * height for width, height in sizes)
        _require(num_images, "images", self._limits.max_images or math.inf, "max_images")
        _require(num_pixels, "pixels", min(self._limits.max_pixels or MAX_PIXELS, MAX_PIXELS), "max_pixels")
        num_added = 0 if self._grid is None else self._grid.num_added_tokens(sizes)
        left, name = room
        most_bytes = (left - num_added) * self._longest_token_bytes
        num_bytes = _num_text_bytes(observation)
        _require(num_bytes, "bytes of text", most_bytes, name)
        ids = await render(num_bytes)
        _require(len(ids) + num_added, "tokens", left, name)
        self._num_tokens += len(ids) + num_added
        self._num_images, self._num_pixels = num_images, num_pixels
        return ids


def _require(number: int, unit: str, most: float, name: str) -> None:
    if number > most:
        raise OverBudgetError(f"{number} {unit}, but {name} leaves room for {max(most, 0):g}")


def _num_text_bytes(observation: Observation) -> int:
    texts = [part.text for message in observation.messages for part in message.parts if isinstance(part, TextPart)]
    values = [call.arguments for message in observation.messages for call in message.tool_calls] + [*observation.tools]
    texts += [json.dumps(value, ensure_ascii=False, default=str) for value in values]
    return sum(len(text.encode()) for text in texts)
