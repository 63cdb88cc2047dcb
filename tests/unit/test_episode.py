"""Episodes against a scripted policy and scripted environments, with the real renderer."""

import asyncio
import dataclasses
import io
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from PIL import Image

from penstock.bus.image_store import hash_of
from penstock.errors import (
    DeadlineError,
    InvalidRequestError,
    MissingImageError,
    PenstockError,
    PoisonError,
    PromptTooLongError,
    UnavailableError,
)
from penstock.model.chat_template import Renderer
from penstock.model.families.qwen_vl import ImageGrid
from penstock.records import GroupId, ImagePart, Limits, Message, Prompt, Sampling, TextPart, Verdict, VersionSpan
from penstock.v1 import common_pb2, generate_pb2
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.base import Observation, StepResult
from services.rollout.worker.environments.registry import EnvironmentRegistry
from services.rollout.worker.episode import Episode, EpisodePlayer
from services.rollout.worker.group_images import GroupImages
from services.rollout.worker.shared_prefill import SharedPrefill
from services.rollout.worker.trajectory import LENGTH, STOP
from tests.support.image_shelf import ImageShelf
from tests.support.waiting import promptly

PICTURE, SECOND_PICTURE = b"\x89PNG first", b"GIF89a second"
END = "<|im_end|>"


@pytest.fixture(scope="module")
def renderer(tiny_model_path: Path) -> Renderer:
    """The tiny model's renderer."""
    return Renderer.load(tiny_model_path)


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
        yield generate_pb2.GenerateChunk(
            output_ids=ids,
            logprobs=[-0.25 * len(self.requests)] * len(ids),
            version_spans=[common_pb2.VersionSpan(num_tokens=len(ids), policy_version=version)],
            finish_reason=generate_pb2.FINISH_REASON_UNSPECIFIED if self.hang else self.finish,
            usage=generate_pb2.Usage(
                num_prompt_tokens=len(request.input_ids) + 8 * len(request.images), num_output_tokens=len(ids)
            ),
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

    async def reset(self, prompt: Prompt, images: tuple[bytes, ...]) -> Observation:
        return Observation(messages=prompt.messages, images=images)

    async def step(self, text: str) -> StepResult:
        self.heard.append(text)
        if len(self.heard) == 2:
            return StepResult(observation=None)
        told = Message(role="user", parts=(TextPart(text="Wrong. "), ImagePart(index=0)))
        return StepResult(observation=Observation(messages=(told,), images=(SECOND_PICTURE,)))

    async def close(self) -> None:
        self.num_closed += 1


class RealPicture(TwoTurns):
    """Answers the first turn with a picture that can be decoded: 96 x 96 pixels, 9 tokens."""

    async def step(self, text: str) -> StepResult:
        result = await super().step(text)
        if result.observation is None:
            return result
        file = io.BytesIO()
        Image.new("RGB", (96, 96)).save(file, "PNG")
        return StepResult(observation=dataclasses.replace(result.observation, images=(file.getvalue(),)))


class Rewarding(TwoTurns):
    """Rewards each step, and measures something in the first."""

    async def step(self, text: str) -> StepResult:
        result = await super().step(text)
        if result.observation is None:
            return dataclasses.replace(result, reward=1.0)
        return dataclasses.replace(result, reward=-0.25, metrics={"distance": 3.0})


class Truncating(TwoTurns):
    """Cuts the episode short after the first turn."""

    async def step(self, text: str) -> StepResult:
        return StepResult(observation=None, truncated=True)


class Stuck(TwoTurns):
    """Never answers."""

    asked: ClassVar[asyncio.Event] = asyncio.Event()

    async def step(self, text: str) -> StepResult:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


class Broken(TwoTurns):
    """Fails while it answers."""

    async def step(self, text: str) -> StepResult:
        raise RuntimeError("the tool crashed")


class OwnPictures(TwoTurns):
    """Hides the prompt's picture."""

    async def reset(self, prompt: Prompt, images: tuple[bytes, ...]) -> Observation:
        return Observation(messages=prompt.messages, images=(SECOND_PICTURE,))


ENVIRONMENTS = {
    kind.__name__: f"{__name__}:{kind.__name__}"
    for kind in (TwoTurns, RealPicture, Rewarding, Truncating, Stuck, Broken, OwnPictures)
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


async def play(player: EpisodePlayer, prompt: Prompt, number: int = 0) -> Episode:
    """Play with the prompt's picture stored."""
    shelf = ImageShelf()
    await shelf.put(prompt.id.scope, PICTURE)
    return await player.play(prompt, number, await GroupImages.load(shelf, prompt), SharedPrefill())


def make_player(
    renderer: Renderer,
    generator: Any,
    *,
    forbidden_ids: Sequence[int] = (),
    context_length: int | None = None,
    grid: ImageGrid | None = None,
    **config: Any,
) -> EpisodePlayer:
    """A player of at most four turns."""
    return EpisodePlayer(
        WorkerConfig(**({"max_turns": 4} | config)),
        renderer=renderer,
        generator=generator,
        environments=EnvironmentRegistry(ENVIRONMENTS),
        forbidden_ids=forbidden_ids,
        context_length=context_length,
        grid=grid,
    )


async def test_a_single_turn_carries_the_engines_tokens_untouched(renderer: Renderer) -> None:
    """One request with the prompt's ids, images and bounds; one sample with the answer's ids, logprobs and version."""
    policy = ScriptedPolicy(renderer, [("\\boxed{3}" + END, 5)])
    episode = await play(make_player(renderer, policy), make_prompt(), 1)
    sample = episode.to_sample(Verdict(score=1.0, status="OK", extracted="3", method="EXACT"))
    [sequence] = sample.sequences
    [request] = policy.requests
    assert request.session_id == "run/3/1/a/1"
    assert request.request_id.startswith("run/3/1/a/1/0/")
    assert [(image.stored.sha256, image.stored.scope) for image in request.images] == [(hash_of(PICTURE), "run.3.1.a")]
    assert request.min_policy_version == 4
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.max_new_tokens) == (0.5, 0, 32)
    own = policy.ids("\\boxed{3}" + END)
    assert sequence.token_ids.tolist() == [*request.input_ids, *own]
    assert sequence.loss_mask.tolist() == [False] * len(request.input_ids) + [True] * len(own)
    assert sequence.logprobs.tolist() == [0.0] * len(request.input_ids) + [-0.25] * len(own)
    assert sequence.version_spans == (VersionSpan(num_tokens=len(own), policy_version=5),)
    assert (sample.text, sample.finish_reason, len(sample.turns), sample.reward) == ("\\boxed{3}", "stop", 1, 1.0)
    assert sequence.num_prompt_tokens == len(request.input_ids) + 8


async def test_the_second_turn_continues_the_first_token_for_token(renderer: Renderer) -> None:
    """Observation ids have mask 0 and no logprobs; the reward sees only what the policy said."""
    policy = ScriptedPolicy(renderer, [("\\boxed{2}" + END, 4), ("\\boxed{3}" + END, 5)])
    episode = await play(make_player(renderer, policy), make_prompt("TwoTurns"), 0)
    sample = episode.to_sample(Verdict(score=1.0, status="OK", extracted="3", method="EXACT"))
    [sequence] = sample.sequences
    first, second = policy.requests
    said, said_next = policy.ids("\\boxed{2}" + END), policy.ids("\\boxed{3}" + END)
    head = [*first.input_ids, *said]
    assert list(second.input_ids[: len(head)]) == head
    observed = list(second.input_ids[len(head) :])
    assert renderer._tokenizer.decode(observed) == (
        "\n<|im_start|>user\nWrong. <|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert sequence.token_ids.tolist() == [*second.input_ids, *said_next]
    runs = [(len(first.input_ids), 0.0), (len(said), -0.25), (len(observed), 0.0), (len(said_next), -0.5)]
    assert sequence.logprobs.tolist() == [value for length, value in runs for _ in range(length)]
    assert sequence.loss_mask.tolist() == [value != 0 for length, value in runs for _ in range(length)]
    assert [(span.num_tokens, span.policy_version) for span in sequence.version_spans] == [
        (len(said), 4),
        (len(said_next), 5),
    ]
    both = (hash_of(PICTURE), hash_of(SECOND_PICTURE))
    assert tuple(image.stored.sha256 for image in second.images) == both
    assert sequence.images == both
    assert first.session_id == second.session_id
    assert first.request_id != second.request_id
    assert (sample.text, sample.finish_reason, len(sample.turns)) == ("\\boxed{2}\n\\boxed{3}", "stop", 2)
    assert TwoTurns.last.heard == ["\\boxed{2}", "\\boxed{3}"]
    assert TwoTurns.last.num_closed == 1


async def test_ids_are_never_made_from_text(renderer: Renderer) -> None:
    """A policy that spells a word in single bytes finds its own spelling in the next turn's prompt."""
    policy = ScriptedPolicy(renderer, [("x", 4), ("y" + END, 4)])
    odd_ids = [i for letter in "Find" for i in policy.ids(letter)] + policy.ids(END)
    assert renderer.decode(odd_ids) == "Find"
    assert odd_ids != policy.ids("Find" + END)
    policy.ids = lambda text: odd_ids  # type: ignore[method-assign]
    await play(make_player(renderer, policy), make_prompt("TwoTurns"), 0)
    start = len(policy.requests[0].input_ids)
    assert list(policy.requests[1].input_ids[start : start + len(odd_ids)]) == odd_ids


async def test_a_turn_that_was_cut_ends_the_episode(renderer: Renderer) -> None:
    """The environment is not asked about half a sentence."""
    policy = ScriptedPolicy(renderer, [("\\boxed{", 4)], finish=LENGTH)
    episode = await play(make_player(renderer, policy), make_prompt("TwoTurns"), 0)
    assert (episode.finish_reason, episode.text) == ("length", "\\boxed{")
    assert TwoTurns.last.heard == []


async def test_the_last_turn_allowed_ends_the_episode(renderer: Renderer) -> None:
    """An observation that no turn will answer is not part of the sample."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    episode = await play(make_player(renderer, policy, max_turns=1), make_prompt("TwoTurns"), 0)
    assert episode.finish_reason == "environment"
    assert episode.trajectory.token_ids == [*policy.requests[0].input_ids, *policy.ids("one" + END)]
    assert episode.trajectory.images == [hash_of(PICTURE)]


async def test_an_environment_may_cut_the_episode_short(renderer: Renderer) -> None:
    """That is told apart from an end that the policy reached."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    episode = await play(make_player(renderer, policy), make_prompt("Truncating"), 0)
    assert episode.finish_reason == "environment"


async def test_a_full_context_ends_the_episode_before_the_observation(renderer: Renderer) -> None:
    """What does not fit is not sent to fail in the engine; the turns played so far count."""

    async def play_within(context_length: int | None) -> tuple[str, list[generate_pb2.GenerateRequest]]:
        policy = ScriptedPolicy(renderer, [("one" + END, 4), ("two" + END, 4)])
        player = make_player(renderer, policy, context_length=context_length)
        episode = await play(player, make_prompt("TwoTurns"), 0)
        return episode.finish_reason, policy.requests

    _, unlimited = await play_within(None)
    # The scripted engine expands the prompt's picture by 8 tokens; 16 tokens of room are kept for the answer.
    just_enough = len(unlimited[1].input_ids) + 8 + 16
    finish_reason, requests = await play_within(just_enough)
    assert (finish_reason, len(requests)) == ("stop", 2)
    finish_reason, requests = await play_within(just_enough - 1)
    assert (finish_reason, len(requests)) == ("length", 1)


async def test_an_observations_images_count_as_the_tokens_that_the_engine_makes_of_them(
    renderer: Renderer, tiny_model_path: Path
) -> None:
    """Not as one token each: an episode that outgrows the context ends as length, before the engine refuses it."""

    async def play_within(context_length: int | None) -> tuple[str, list[generate_pb2.GenerateRequest]]:
        policy = ScriptedPolicy(renderer, [("one" + END, 4), ("two" + END, 4)])
        grid = ImageGrid.of(tiny_model_path)
        player = make_player(renderer, policy, context_length=context_length, grid=grid)
        episode = await play(player, make_prompt("RealPicture"), 0)
        return episode.finish_reason, policy.requests

    _, unlimited = await play_within(None)
    just_enough = len(unlimited[1].input_ids) + 8 + 8 + 16
    finish_reason, requests = await play_within(just_enough)
    assert (finish_reason, len(requests)) == ("stop", 2)
    finish_reason, requests = await play_within(just_enough - 1)
    assert (finish_reason, len(requests)) == ("length", 1)


async def test_a_sampled_placeholder_is_refused(renderer: Renderer) -> None:
    """An image placeholder in the answer would make the trainer look for an image that is not there."""
    policy = ScriptedPolicy(renderer, [("<|image_pad|>" + END, 4)])
    player = make_player(renderer, policy, forbidden_ids=policy.ids("<|image_pad|>"))
    with pytest.raises(PenstockError, match="may never be sampled"):
        await play(player, make_prompt(), 0)


async def test_a_turn_that_takes_too_long_ends_its_sample_with_the_tokens_that_came(renderer: Renderer) -> None:
    """A slow sample is never drawn again; its reason is not taken for a full context."""
    policy = ScriptedPolicy(renderer, [("\\boxed{", 4)], hang=True)
    episode = await play(make_player(renderer, policy, turn_timeout_s=0.1), make_prompt("TwoTurns"), 0)
    assert (episode.finish_reason, episode.text, episode.error) == ("deadline", "\\boxed{", "")
    assert TwoTurns.last.heard == []


async def test_an_environment_that_hangs_ends_the_sample_at_the_episodes_deadline(renderer: Renderer) -> None:
    """Every await on the outside world has one; the policy's turn counts."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    episode = await play(make_player(renderer, policy, episode_timeout_s=0.3), make_prompt("Stuck"), 0)
    assert (episode.finish_reason, episode.text, episode.error) == ("deadline", "one", "")
    assert TwoTurns.last.num_closed == 1


async def test_an_environment_that_fails_ends_its_own_sample_unjudged(renderer: Renderer) -> None:
    """What it raises may depend on what the policy said, so nothing is drawn again for it."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    episode = await play(make_player(renderer, policy), make_prompt("Broken"), 0)
    assert (episode.finish_reason, episode.text) == ("error", "one")
    assert episode.error == "environment 'Broken': RuntimeError: the tool crashed"
    assert TwoTurns.last.num_closed == 1


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (PromptTooLongError("13 tokens of room"), "length"),
        (PoisonError("given up after 3 replicas failed"), "error"),
        (InvalidRequestError("images[1] cannot be decoded"), "error"),
        (DeadlineError("no token came"), "deadline"),
    ],
)
async def test_a_later_turn_that_fails_ends_the_sample_with_the_turns_before(
    renderer: Renderer, error: PenstockError, ending: str
) -> None:
    """Tokens are never thrown away, so long episodes are not selected against."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4), error])
    episode = await play(make_player(renderer, policy), make_prompt("TwoTurns"), 0)
    assert (episode.finish_reason, episode.text) == (ending, "one")
    assert episode.error == (str(error) if ending == "error" else "")


async def test_a_cancelled_episode_closes_its_environment(renderer: Renderer) -> None:
    """Cancelling waits for nothing else."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    Stuck.asked = asyncio.Event()
    task = asyncio.create_task(play(make_player(renderer, policy), make_prompt("Stuck")))
    await promptly(Stuck.asked.wait())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert TwoTurns.last.num_closed == 1


async def test_an_environment_must_show_the_prompts_images_first(renderer: Renderer) -> None:
    """The trainer pairs placeholders with images by their order."""
    with pytest.raises(PenstockError, match="show the prompt's images first"):
        await play(make_player(renderer, ScriptedPolicy(renderer, [])), make_prompt("OwnPictures"), 0)


async def test_an_unknown_environment_makes_the_prompt_invalid(renderer: Renderer) -> None:
    """The message lists those that are known."""
    with pytest.raises(InvalidRequestError, match=r"'chess' is unknown; known: .*single_turn"):
        await play(make_player(renderer, ScriptedPolicy(renderer, [])), make_prompt("chess"), 0)


async def test_the_generators_failure_is_the_episodes(renderer: Renderer) -> None:
    """A sample without a token fails its group."""

    policy = ScriptedPolicy(renderer, [UnavailableError("no replica")])
    with pytest.raises(UnavailableError, match="no replica"):
        await play(make_player(renderer, policy, wait_timeout_s=0.01), make_prompt("TwoTurns"), 0)
    assert TwoTurns.last.num_closed == 1


async def test_an_environments_rewards_are_the_samples(renderer: Renderer) -> None:
    """Each step keeps its own; the sample's is their sum, and no verdict is asked for."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4), ("two" + END, 4)])
    episode = await play(make_player(renderer, policy), make_prompt("Rewarding"))
    assert not episode.needs_verdict
    sample = episode.to_sample(None)
    assert (sample.reward, sample.verdict) == (0.75, None)
    assert [(turn.reward, turn.metrics) for turn in sample.turns] == [(-0.25, {"distance": 3.0}), (1.0, {})]


async def test_a_rows_limits_come_before_the_workers(renderer: Renderer) -> None:
    """Turns, tokens and times; what a row does not limit stays the worker's."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    episode = await play(make_player(renderer, policy), make_prompt("TwoTurns", limits=Limits(max_turns=1)))
    assert (episode.finish_reason, len(policy.requests)) == ("environment", 1)
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    episode = await play(make_player(renderer, policy), make_prompt("TwoTurns", limits=Limits(max_tokens=40)))
    assert (episode.finish_reason, len(policy.requests)) == ("length", 1)
    policy = ScriptedPolicy(renderer, [("one", 4)], hang=True)
    episode = await play(make_player(renderer, policy), make_prompt(limits=Limits(turn_timeout_s=0.1)))
    assert episode.finish_reason == "deadline"


async def test_an_exact_version_is_played_by_no_other(renderer: Renderer) -> None:
    """An evaluation of version 5 refuses version 6, which a training prompt would take."""
    policy = ScriptedPolicy(renderer, [("one" + END, 6)])
    with pytest.raises(PenstockError, match="policy versions 6 to 6, but only 5 was asked for"):
        await play(make_player(renderer, policy), make_prompt(exact_version=5))
    assert policy.requests[0].min_policy_version == 5


async def test_an_image_lost_on_the_bus_is_stored_again_once(renderer: Renderer) -> None:
    """The worker still has it; the turn is played again."""
    policy = ScriptedPolicy(renderer, [MissingImageError("gone"), ("one" + END, 4)])
    shelf, prompt = ImageShelf(), make_prompt()
    await shelf.put(prompt.id.scope, PICTURE)
    images = await GroupImages.load(shelf, prompt)
    shelf.images.clear()
    episode = await make_player(renderer, policy).play(prompt, 0, images, SharedPrefill())
    assert (episode.finish_reason, len(policy.requests)) == ("stop", 2)
    assert await shelf.get(prompt.id.scope, hash_of(PICTURE)) == PICTURE


async def test_an_image_that_is_lost_twice_ends_the_sample_with_the_turns_before(renderer: Renderer) -> None:
    """Unjudged. A sample that has tokens does not fail its group."""
    lost = [MissingImageError("gone"), MissingImageError("gone again")]
    policy = ScriptedPolicy(renderer, [("one" + END, 4), *lost])
    episode = await play(make_player(renderer, policy), make_prompt("TwoTurns"))
    assert (episode.finish_reason, episode.error, episode.text) == ("error", "gone again", "one")
    assert not episode.needs_verdict
    with pytest.raises(MissingImageError, match="gone again"):
        await play(make_player(renderer, ScriptedPolicy(renderer, lost)), make_prompt())


@pytest.mark.parametrize(
    ("failure", "ending"),
    [(InvalidRequestError("an image is too large"), "error"), (UnavailableError("the bus is away"), "deadline")],
)
async def test_an_observation_whose_image_cannot_be_stored_ends_its_sample(
    renderer: Renderer, failure: PenstockError, ending: str
) -> None:
    """Not its group: what an environment shows may depend on what the policy said."""

    class FullShelf(ImageShelf):
        async def put(self, scope: str, data: bytes) -> str:
            if self.num_stored:
                raise failure
            return await super().put(scope, data)

    shelf, prompt = FullShelf(), make_prompt("TwoTurns")
    await shelf.put(prompt.id.scope, PICTURE)
    policy = ScriptedPolicy(renderer, [("one" + END, 4)])
    episode = await make_player(renderer, policy).play(
        prompt, 0, await GroupImages.load(shelf, prompt), SharedPrefill()
    )
    assert (episode.finish_reason, episode.text) == (ending, "one")


async def test_a_group_stores_an_image_once_however_many_samples_show_it(renderer: Renderer) -> None:
    """Sixteen samples in two turns: the prompt's picture and the environment's, each stored once."""
    shelf, prompt = ImageShelf(), make_prompt("TwoTurns")
    await shelf.put(prompt.id.scope, PICTURE)
    images = await GroupImages.load(shelf, prompt)

    async def play_one(number: int) -> None:
        policy = ScriptedPolicy(renderer, [("one" + END, 4), ("two" + END, 4)])
        await make_player(renderer, policy).play(prompt, number, images, SharedPrefill())

    await asyncio.gather(*map(play_one, range(16)))
    assert shelf.num_stored == 2
