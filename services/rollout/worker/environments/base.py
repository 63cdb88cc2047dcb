"""The interface of environments: what a policy plays against.

An environment object plays one episode and belongs to it alone. It deals in messages and text; token ids, masks and
logprobs are the episode's business, so no environment can damage what the trainer learns from.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol, TypeAlias

from penstock.records import ImagePart, Message, Prompt


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the policy gets to see next."""

    messages: tuple[Message, ...]
    """New messages; after the first turn, of roles that may follow the assistant's (user, tool)."""
    images: tuple[bytes, ...] = ()
    """Encoded files of the images that the messages show; their `ImagePart.index` counts from 0 within these."""

    def __post_init__(self) -> None:
        indices = [part.index for message in self.messages for part in message.parts if isinstance(part, ImagePart)]
        if indices != list(range(len(self.images))):
            raise ValueError(f"messages refer to images {indices}, but the observation brings {len(self.images)}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """An environment's answer to one turn: an observation to go on with, or the end."""

    observation: Observation | None
    """None ends the episode."""
    truncated: bool = False
    """At the end: whether the environment cut the episode short, instead of the policy finishing it."""


class Environment(Protocol):
    """One episode's counterpart. Calls come in the order reset, step ..., close; each has a deadline."""

    async def reset(self, prompt: Prompt) -> Observation:
        """Begin: the conversation that the policy is shown first. Its images start with the prompt's."""
        ...

    async def step(self, text: str) -> StepResult:
        """Answer a turn; `text` is what the policy said, without special tokens."""
        ...

    async def close(self) -> None:
        """Release what the episode held; called once, however the episode ends."""
        ...


EnvironmentFactory: TypeAlias = Callable[[], Environment]
"""Makes the environment of one episode."""
