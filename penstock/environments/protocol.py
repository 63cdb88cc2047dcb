"""The interface of environments: what a policy plays against.

An environment object plays one episode and belongs to it alone. It deals in messages, text and images; token ids, masks
and logprobs belong to the episode, so no environment can damage what the trainer learns from.
"""

import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias

from penstock.model.assistant_turn import AssistantTurn
from penstock.records import ImagePart, Message, Verdict

Grade: TypeAlias = Callable[[str], Awaitable[Verdict]]
"""Asks the reward service what a text is worth as the answer to the task, by the task's golds and profile. An
environment that asks it judges exactly as the end of a single-turn episode does."""

BlockingGrade: TypeAlias = Callable[[str], Verdict]
"""The same for blocking environments: it returns when the verdict is there. Any thread may call it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """What one episode is about: a row of the data made ready. All of a task but its way to the reward service."""

    id: str
    """Identity of the sample: run, group, attempt, start of the trainer, and the sample's number."""
    seed: int
    """For an environment that draws: the same for all samples of a group, whose rewards are compared, and for all
    attempts to play it."""
    messages: tuple[Message, ...]
    images: tuple[bytes, ...] = ()
    """Encoded files, in the order of the messages' image parts."""
    golds: tuple[str, ...] = ()
    profile: str = ""
    """The reward service's profile for this row."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas in OpenAI's form that the row itself brings."""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The row's further columns, as JSON."""
    max_turns: int | None = None
    """The row's or the data set's limit; None if neither has one. The episode holds it in any case; an environment may
    want to warn of it, or has a default of its own."""
    remaining_s: Callable[[], float] = lambda: math.inf
    """Seconds that the episode has left; the time stands still while the policy waits for a replica. An environment
    whose call takes longer is cut off there, wherever it runs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task(TaskRow):
    """What an environment's episode is about."""

    grade: Grade


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockingTask(TaskRow):
    """What a blocking environment's episode is about."""

    grade: BlockingGrade


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the policy sees next."""

    messages: tuple[Message, ...]
    """New messages; after the first turn, of roles that may follow the assistant's (user, tool)."""
    images: tuple[bytes, ...] = ()
    """Encoded files of the images that the messages show; their `ImagePart.index` counts from 0 within these."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """What the policy may call, as JSON schemas in OpenAI's form. Only the first observation can show tools: the
    model's chat template writes them before the conversation."""

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
    is not asked; otherwise it judges the text of the last turn."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What was measured in this step, by name; kept with the step."""
    kind: str = ""
    """What the environment took the turn for, in a word of its own; shown to people who play it by hand."""

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"reward = {self.reward} must be a finite number, or None if this step has none")
        if wrong := {name: value for name, value in self.metrics.items() if not math.isfinite(value)}:
            raise ValueError(f"metrics {wrong} must be finite numbers; leave out what was not measured")


class Environment(Protocol):
    """One episode's counterpart. Calls come in the order reset, step ..., close; each has a deadline."""

    async def reset(self, task: Task) -> Observation:
        """Begin: the conversation that the policy sees first. Its images start with the task's, unchanged."""
        ...

    async def step(self, turn: AssistantTurn) -> StepResult:
        """Answer a turn of the policy."""
        ...

    async def close(self) -> None:
        """Release what the episode held; called once, however the episode ends."""
        ...


class BlockingEnvironment(Protocol):
    """An environment of plain functions. It runs in a process of its own, one for each episode, and may block it."""

    def reset(self, task: BlockingTask) -> Observation:
        """Begin, as `Environment.reset` does."""
        ...

    def step(self, turn: AssistantTurn) -> StepResult:
        """Answer a turn of the policy."""
        ...

    def close(self) -> None:
        """Release what the episode held. It is not called after a crash, nor after a call that took too long."""
        ...


EnvironmentFactory: TypeAlias = Callable[[], Environment]
"""Makes the environment of one episode."""
