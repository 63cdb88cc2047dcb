"""A policy and environments that follow a script, for tests of episodes."""

import asyncio
import dataclasses
import io
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

from PIL import Image

from penstock.bus.image_store import hash_of
from penstock.environments import AssistantTurn, Observation, StepResult, Task
from penstock.model.chat.chat_template import Renderer
from penstock.model.families.qwen_vl import ImageGrid
from penstock.records import GroupId, ImagePart, Message, Prompt, Sampling, TextPart
from penstock.v1 import common_pb2, generate_pb2, reward_pb2
from services.rollout.worker.answer_verifier import AnswerVerifier, Verifier
from services.rollout.worker.closings import Closings
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.registry import EnvironmentRegistry
from services.rollout.worker.episodes.episode import Episode
from services.rollout.worker.episodes.episode_player import EpisodePlayer
from services.rollout.worker.episodes.trajectory import STOP
from services.rollout.worker.episodes.turn import WAIT_TIMEOUT_S
from services.rollout.worker.group_images import GroupImages
from services.rollout.worker.shared_rendering import SharedRendering
from tests.support.image_shelf import ImageShelf

END = "<|im_end|>"


def picture(width: int = 96, height: int = 96, *, form: str = "PNG") -> bytes:
    """The file of a black picture; the tiny model makes 9 tokens of one of 96 x 96 pixels."""
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, form)
    return file.getvalue()


PICTURE, SECOND_PICTURE = picture(), picture(form="GIF")


@dataclasses.dataclass
class ScriptedPolicy:
    """Says `turns` one after another: text and the version that says it, or an error. With `hang` no turn ends."""

    renderer: Renderer
    turns: Sequence[tuple[str, int] | Exception]
    finish: generate_pb2.FinishReason.ValueType = STOP
    hang: bool = False
    requests: list[generate_pb2.GenerateRequest] = dataclasses.field(default_factory=list)

    def ids(self, text: str) -> list[int]:
        """Ids of what it says."""
        return list(self.renderer._tokenizer(text, add_special_tokens=False).input_ids)

    async def stream(
        self, request: generate_pb2.GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[generate_pb2.GenerateChunk, None]:
        """The next turn, in one chunk."""
        turn = self.turns[len(self.requests)]
        self.requests.append(request)
        if isinstance(turn, Exception):
            raise turn
        text, version = turn
        ids = self.ids(text)
        num_prompt_tokens = len(request.input_ids) + 8 * len(request.images)
        experts = None
        if request.HasField("routed_experts_from"):
            first = request.routed_experts_from
            num_computed = num_prompt_tokens + len(ids) - 1 - first
            sizes = {"num_layers": 1, "num_experts_per_token": 2, "id_size_bytes": 1}
            experts = generate_pb2.RoutedExperts(first_token=first, expert_ids=bytes(2 * num_computed), **sizes)
        yield generate_pb2.GenerateChunk(
            output_ids=ids,
            logprobs=[-0.25 * len(self.requests)] * len(ids),
            version_spans=[common_pb2.VersionSpan(num_tokens=len(ids), policy_version=version)],
            finish_reason=generate_pb2.FINISH_REASON_UNSPECIFIED if self.hang else self.finish,
            usage=generate_pb2.Usage(num_prompt_tokens=num_prompt_tokens, num_output_tokens=len(ids)),
            routed_experts=experts,
        )
        if self.hang:
            await asyncio.Event().wait()


class TwoTurns:
    """Answers the first turn with a picture and ends after the second; remembers what it was told."""

    last: "TwoTurns"

    def __init__(self) -> None:
        TwoTurns.last = self
        self.heard: list[str] = []
        self.num_closed = 0

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=task.messages, images=task.images)

    async def step(self, turn: AssistantTurn) -> StepResult:
        self.heard.append(turn.text)
        if len(self.heard) == 2:
            return StepResult(observation=None)
        told = Message(role="user", parts=(TextPart(text="Wrong. "), ImagePart(index=0)))
        return StepResult(observation=Observation(messages=(told,), images=(SECOND_PICTURE,)))

    async def close(self) -> None:
        self.num_closed += 1


class Rewarding(TwoTurns):
    """Rewards each step, and measures something in the first."""

    async def step(self, turn: AssistantTurn) -> StepResult:
        result = await super().step(turn)
        if result.observation is None:
            return dataclasses.replace(result, reward=1.0)
        return dataclasses.replace(result, reward=-0.25, metrics={"distance": 3.0})


class Truncating(TwoTurns):
    """Cuts the episode short after the first turn."""

    async def step(self, turn: AssistantTurn) -> StepResult:
        return StepResult(observation=None, truncated=True)


class Stuck(TwoTurns):
    """Never answers."""

    asked: ClassVar[asyncio.Event] = asyncio.Event()

    async def step(self, turn: AssistantTurn) -> StepResult:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


class Broken(TwoTurns):
    """Fails while it answers."""

    async def step(self, turn: AssistantTurn) -> StepResult:
        raise RuntimeError("the tool crashed")


class OwnPictures(TwoTurns):
    """Hides the prompt's picture."""

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=task.messages, images=(SECOND_PICTURE,))


class Scripted:
    """Begins and answers as `plays` says: with a result, an exception, or what a function makes of
    the task. It begins with the row's own messages once `resets` is used up."""

    resets: ClassVar[list[Any]] = []
    answers: ClassVar[list[Any]] = []
    num_made: ClassVar[int] = 0
    num_closed: ClassVar[int] = 0

    def __init__(self) -> None:
        Scripted.num_made += 1

    @classmethod
    def plays(cls, *answers: Any, resets: Sequence[Any] = ()) -> None:
        """Begin a script."""
        cls.resets, cls.answers, cls.num_made, cls.num_closed = [*resets], [*answers], 0, 0

    async def reset(self, task: Task) -> Observation:
        self.task = task
        own = Observation(messages=task.messages, images=task.images, tools=task.tools)
        return await self._next(self.resets) if self.resets else own

    async def step(self, turn: AssistantTurn) -> StepResult:
        return await self._next(self.answers)

    async def close(self) -> None:
        Scripted.num_closed += 1

    async def _next(self, script: list[Any]) -> Any:
        item = script.pop(0)
        if isinstance(item, Exception):
            raise item
        return await item(self.task) if callable(item) else item


DONE = StepResult(observation=None)


def shows(text: str, *images: bytes, role: Any = "user", **rest: Any) -> StepResult:
    """An answer with a message of text and images."""
    parts = (TextPart(text=text), *(ImagePart(index=index) for index in range(len(images))))
    return StepResult(observation=Observation(messages=(Message(role=role, parts=parts),), images=images), **rest)


ENVIRONMENTS = {
    kind.__name__: f"{__name__}:{kind.__name__}"
    for kind in (TwoTurns, Scripted, Rewarding, Truncating, Stuck, Broken, OwnPictures)
}


def make_prompt(environment: str = "single_turn", **changes: Any) -> Prompt:
    """One picture and a question."""
    fields: dict[str, Any] = {
        "id": GroupId(run_id="run", index=3, attempt=1, trainer_epoch="a"),
        "admitted_version": 4,
        "num_samples": 2,
        "sampling": Sampling(temperature=0.5, max_new_tokens=32),
        "messages": (Message(role="user", parts=(ImagePart(index=0), TextPart(text="Find x."))),),
        "images": (hash_of(PICTURE),),
        "golds": ("3",),
        "profile": "math",
        "environment": environment,
    }
    return Prompt(**(fields | changes))


class NoVerifier:
    """For episodes that ask for no verdict."""

    async def verify_batch(
        self, items: Sequence[reward_pb2.VerifyItem], *, timeout_s: float, retry_until: float | None = None
    ) -> list[reward_pb2.Verdict]:
        raise AssertionError(f"nothing is judged here, but {len(items)} items came")


async def play(player: EpisodePlayer, prompt: Prompt, number: int = 0) -> Episode:
    """Play with the prompt's picture stored, until its environment is closed."""
    shelf = ImageShelf()
    await shelf.put(prompt.id.scope, PICTURE)
    images = await GroupImages.load(shelf, prompt)
    async with Closings() as closings:
        return await player.play(prompt, number, images, SharedRendering(), closings)


def make_player(
    renderer: Renderer,
    generator: Any,
    *,
    forbidden_ids: Sequence[int] = (),
    context_length: int | None = None,
    grid: ImageGrid | None = None,
    verifier: Verifier | None = None,
    environments: Mapping[str, str] | EnvironmentRegistry = ENVIRONMENTS,
    wait_timeout_s: float = WAIT_TIMEOUT_S,
    router_replay: bool = False,
    **config: Any,
) -> EpisodePlayer:
    """A player whose environments may have `verifier` judge answers."""
    if not isinstance(environments, EnvironmentRegistry):
        environments = EnvironmentRegistry(WorkerConfig(environments=environments).environments)
    return EpisodePlayer(
        WorkerConfig(**config),
        renderer=renderer,
        generator=generator,
        environments=environments,
        answer_verifier=AnswerVerifier(verifier or NoVerifier(), wait_timeout_s=wait_timeout_s),
        forbidden_ids=forbidden_ids,
        context_length=context_length,
        grid=grid,
        wait_timeout_s=wait_timeout_s,
        router_replay=router_replay,
    )
