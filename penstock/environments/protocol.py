"""The interface of environments, which policies play against.

An environment object plays exactly one episode. It handles messages, text and images; token ids, masks and logprobs
belong to the episode, so no environment can damage the training data.
"""

import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias

from penstock.model.chat.assistant_turn import AssistantTurn
from penstock.records import ImagePart, Message, Verdict
from penstock.runtime.numbers import finite_float, shown

Grade: TypeAlias = Callable[[str], Awaitable[Verdict]]
"""Has the reward service judge a text as the answer to the task, by the task's golds and profile. An environment that
calls it judges exactly as the end of a single-turn episode does."""

BlockingGrade: TypeAlias = Callable[[str], Verdict]
"""The same for blocking environments: it returns when the verdict has arrived. Any thread may call it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """A dataset row ready for one episode: a whole task except its way to the reward service."""

    id: str
    """Identity of the sample: run, group, attempt, start of the trainer, and the sample's number."""
    seed: int
    """Seed for an environment that draws: the same for all samples of a group, whose rewards are compared, and for all
    attempts to play it; of an evaluation's row the same in all evaluations."""
    messages: tuple[Message, ...]
    images: tuple[bytes, ...] = ()
    """Encoded files, in the order of the messages' image parts."""
    golds: tuple[str, ...] = ()
    profile: str = ""
    """The reward service's profile for this row."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The row's own tools, as JSON schemas in OpenAI's form."""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The row's other columns, as JSON."""
    max_turns: int | None = None
    """The limit of the row or the data set; None if neither has one. The episode enforces it in any case; an
    environment may want to warn the policy, or has its own default."""
    remaining_s: Callable[[], float] = lambda: math.inf
    """Seconds left in the episode; the clock stops while the policy waits for a replica. An environment's call that
    takes longer is cut off, wherever it runs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task(TaskRow):
    """The task of an environment's episode."""

    grade: Grade


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockingTask(TaskRow):
    """The task of a blocking environment's episode."""

    grade: BlockingGrade


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The policy's next input."""

    messages: tuple[Message, ...]
    """New messages; after the first turn, of roles that may follow the assistant's (user, tool)."""
    images: tuple[bytes, ...] = ()
    """Encoded files of the images that the messages show; their `ImagePart.index` counts from 0 within these."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that the policy may call, as JSON schemas in OpenAI's form. Only the first observation can show tools:
    the model's chat template writes them before the conversation."""

    def __post_init__(self) -> None:
        images = tuple(self.images)
        for index, image in enumerate(images):
            if not isinstance(image, bytes | bytearray | memoryview):
                raise ValueError(f"images[{index}] is a {type(image).__name__}; give the bytes of an encoded file")
        object.__setattr__(self, "images", tuple(map(bytes, images)))
        indices = [part.index for message in self.messages for part in message.parts if isinstance(part, ImagePart)]
        if indices != list(range(len(self.images))):
            raise ValueError(f"messages refer to images {indices}, but the observation brings {len(self.images)}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """An environment's answer to one turn: the next observation, or the end."""

    observation: Observation | None
    """None ends the episode."""
    truncated: bool = False
    """At the end: whether the environment cut the episode short, instead of the policy finishing it."""
    reward: float | None = None
    """This step's reward. If any step of an episode has one, the sample's reward is their sum and the reward service
    is not asked; otherwise it judges the text of the last turn."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Measurements of this step by name; kept with the step."""
    kind: str = ""
    """The environment's own word for its reading of the turn; shown to people who play it by hand."""

    def __post_init__(self) -> None:
        if self.reward is not None:
            reward = finite_float(self.reward)
            if reward is None:
                raise ValueError(
                    f"reward = {shown(self.reward)} must be a finite number, or None if this step has none"
                )
            object.__setattr__(self, "reward", reward)  # what NumPy or a fraction calls a number can be sent, too
        metrics = {name: finite_float(value) for name, value in self.metrics.items()}
        if wrong := [f"{name} = {shown(self.metrics[name])}" for name, value in metrics.items() if value is None]:
            raise ValueError(f"metrics {', '.join(wrong)} must be finite numbers; leave out what was not measured")
        object.__setattr__(self, "metrics", {str(name): value for name, value in metrics.items()})


class Environment(Protocol):
    """An environment of one episode. Calls come in the order reset, step ..., close; each has a deadline."""

    async def reset(self, task: Task) -> Observation:
        """Begin the episode: return the first conversation. Its images start with the task's, unchanged."""
        ...

    async def step(self, turn: AssistantTurn) -> StepResult:
        """Answer a turn of the policy."""
        ...

    async def close(self) -> None:
        """Release the episode's resources; called once, however the episode ends."""
        ...


class BlockingEnvironment(Protocol):
    """An environment of plain functions. It runs in its own process, one for each episode, and may block it."""

    def reset(self, task: BlockingTask) -> Observation:
        """Begin the episode, as `Environment.reset` does."""
        ...

    def step(self, turn: AssistantTurn) -> StepResult:
        """Answer a turn of the policy."""
        ...

    def close(self) -> None:
        """Release the episode's resources. Not called after a crash, nor after a call that took too long."""
        ...


EnvironmentFactory: TypeAlias = Callable[[], Environment]
"""Makes the environment of one episode."""
