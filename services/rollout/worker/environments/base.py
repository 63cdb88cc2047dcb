"""The interface of environments: what a policy plays against.

An environment object plays one episode and belongs to it alone. It deals in messages and text; token ids, masks and
logprobs belong to the episode, so no environment can damage what the trainer learns from.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from penstock.records import ImagePart, Message, Prompt


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the policy sees next."""

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
    reward: float | None = None
    """This step's reward. If any step of an episode has one, the sample's reward is their sum and the reward service
    is not asked."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What was measured in this step, by name; kept with the step."""


class Environment(Protocol):
    """One episode's counterpart. Calls come in the order reset, step ..., close; each has a deadline."""

    async def reset(self, prompt: Prompt, images: tuple[bytes, ...]) -> Observation:
        """Begin: the conversation that the policy sees first. Its images start with `images`, the prompt's."""
        ...

    async def step(self, text: str) -> StepResult:
        """Answer a turn; `text` is what the policy said, without special tokens."""
        ...

    async def close(self) -> None:
        """Release what the episode held; called once, however the episode ends."""
        ...


EnvironmentFactory: TypeAlias = Callable[[], Environment]
"""Makes the environment of one episode."""
