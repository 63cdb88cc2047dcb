"""The budgets of an episode, given by settings and by rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import pydantic

from penstock.config import Config

if TYPE_CHECKING:
    from penstock.records import Limits


class LimitsConfig(Config):
    """Budgets of each episode. A turn or observation that does not fit ends the episode, and no part of it is appended;
    the rules are in docs/rollouts/environments.md."""

    max_turns: int = pydantic.Field(default=0, ge=0)
    """Most turns of the policy. 0: no limit; the environment ends its episode, or the context is full."""
    max_tokens: int = pydantic.Field(default=0, ge=0)
    """Most tokens of the whole conversation, the prompt included and images expanded. 0: the context's length."""
    max_observation_tokens: int = pydantic.Field(default=0, ge=0)
    """Most tokens, images expanded, that the environment adds after the prompt in total. 0: no limit."""
    max_images: int = pydantic.Field(default=0, ge=0)
    """Most images, the prompt's included. 0: no limit."""
    max_pixels: int = pydantic.Field(default=0, ge=0)
    """Most pixels of all images together, the prompt's included, at their files' sizes. 0: 100 million, the most that
    engines take."""
    turn_timeout_s: float = pydantic.Field(default=0.0, ge=0)
    """Seconds of a turn, without queueing. 0: the rest of its episode."""
    episode_timeout_s: float = pydantic.Field(default=0.0, ge=0)
    """Seconds of an episode, without queueing unless an agent plays it; at most worker.episode_timeout_s. 0:
    worker.episode_timeout_s."""

    def of_row(self, given: Any) -> Self:
        """Return these limits, overridden by those that a row gives.

        Args:
            given: A struct, or its JSON text. Missing or null limits are not overridden.

        Raises:
            ValueError: it is not a struct, or has an unknown key or an invalid value.
        """
        try:
            values = json.loads(given) if isinstance(given, str) and given else given or {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"text that is no JSON: {error}") from None
        if not isinstance(values, Mapping):
            raise ValueError(f"{str(given)[:80]}; want a struct of limits, or its JSON")
        own = {key: value for key, value in values.items() if value is not None}
        for key, value in own.items():
            if isinstance(value, bool | str):
                raise ValueError(f"{key} = {value!r}; want a number")
        try:
            return type(self).model_validate(self.model_dump() | own)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                raise ValueError(f"{key!r}, which is no limit; known: {', '.join(type(self).model_fields)}") from None
            raise ValueError(f"{key} = {own.get(key)!r}: {first['msg']}") from None

    def as_record(self) -> Limits:
        """Return the record of the limits that travels with a prompt."""
        from penstock.records import Limits

        return Limits(**{name: value or None for name, value in self.model_dump().items()})
