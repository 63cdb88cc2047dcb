"""Episodes against a scripted policy and scripted environments, with the real renderer."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.bus.image_store import hash_of
from penstock.environments import Observation, StepResult, Task
from penstock.errors import (
    InvalidRequestError,
    MissingImageError,
    PenstockError,
)
from penstock.model.chat.chat_template import Renderer
from penstock.model.families.qwen_vl import ImageGrid
from penstock.records import Sample, Sampling, Verdict, VersionSpan
from penstock.records.codec import decode, encode
from penstock.v1 import generate_pb2
from services.rollout.worker.closings import Closings
from services.rollout.worker.episodes.trajectory import LENGTH
from services.rollout.worker.group_images import GroupImages
from services.rollout.worker.shared_rendering import SharedRendering
from tests.support.image_shelf import ImageShelf
from tests.support.worker.scripted_episodes import (
    DONE,
    END,
    PICTURE,
    SECOND_PICTURE,
    Scripted,
    ScriptedPolicy,
    TwoTurns,
    make_player,
    make_prompt,
    play,
    shows,
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


async def test_an_observations_images_count_as_the_tokens_that_the_engine_makes_of_them(
    renderer: Renderer, tiny_model_path: Path
) -> None:
    """Not as one token each: an episode that outgrows the context ends as length, before the engine refuses it."""

    async def play_within(context_length: int | None) -> tuple[str, list[generate_pb2.GenerateRequest]]:
        policy = ScriptedPolicy(renderer, [("one" + END, 4), ("two" + END, 4)])
        grid = ImageGrid.of(tiny_model_path)
        player = make_player(renderer, policy, context_length=context_length, grid=grid)
        episode = await play(player, make_prompt("TwoTurns"), 0)
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


async def test_an_environment_must_show_the_prompts_images_first(renderer: Renderer) -> None:
    """The trainer pairs placeholders with images by their order."""
    with pytest.raises(PenstockError, match="show the prompt's images first"):
        await play(make_player(renderer, ScriptedPolicy(renderer, [])), make_prompt("OwnPictures"), 0)


async def test_an_unknown_environment_makes_the_prompt_invalid(renderer: Renderer) -> None:
    """The message lists those that are known."""
    with pytest.raises(InvalidRequestError, match=r"'chess' is unknown; known: .*single_turn"):
        await play(make_player(renderer, ScriptedPolicy(renderer, [])), make_prompt("chess"), 0)


async def test_an_environments_rewards_are_the_samples(renderer: Renderer) -> None:
    """Each step keeps its own; the sample's is their sum, and no verdict is asked for."""
    policy = ScriptedPolicy(renderer, [("one" + END, 4), ("two" + END, 4)])
    episode = await play(make_player(renderer, policy), make_prompt("Rewarding"))
    assert not episode.needs_verdict
    sample = episode.to_sample(None)
    assert (sample.reward, sample.verdict) == (0.75, None)
    assert [(turn.reward, turn.metrics) for turn in sample.turns] == [(-0.25, {"distance": 3.0}), (1.0, {})]


async def test_a_turn_says_when_it_began_and_how_long_its_environment_took(renderer: Renderer, clock: Any) -> None:
    """Its step alone, also where that fails. The environment is not asked about a turn that was cut."""

    async def begin(task: Task) -> Observation:
        clock.at += 5.0
        return Observation(messages=task.messages, images=task.images)

    async def look(_: Task) -> StepResult:
        clock.at += 3.0
        return shows("Look.")

    async def fail(_: Task) -> StepResult:
        clock.at += 2.0
        raise RuntimeError("the tool crashed")

    clock.at = 100.0
    Scripted.plays(look, fail, resets=[begin])
    policy = ScriptedPolicy(renderer, [("one" + END, 4), ("two" + END, 4)])
    sample = (await play(make_player(renderer, policy), make_prompt("Scripted"))).to_sample(None)
    assert (sample.finish_reason, sample.started_at, sample.elapsed_s) == ("error", 100.0, 10.0)
    assert [(turn.started_at, turn.environment_s) for turn in sample.turns] == [(105.0, 3.0), (108.0, 2.0)]
    cut = await play(make_player(renderer, ScriptedPolicy(renderer, [("one", 4)], finish=LENGTH)), make_prompt())
    assert [(turn.started_at, turn.environment_s) for turn in cut.trajectory.turns] == [(110.0, 0.0)]


async def test_a_turn_names_the_tools_that_it_called(renderer: Renderer) -> None:
    """As the policy wrote them, whether or not there are such tools: cut, and so that the group can be sent."""

    def call(name: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>\n'

    Scripted.plays(shows("9", role="tool"), shows("9"), DONE)
    odd = "\\ud800" + 99 * "x"
    texts = [f"I look.\n{call('zoom')}{call('python')}{call('zoom')}", call(odd), "3"]
    policy = ScriptedPolicy(renderer, [(text + END, 4) for text in texts])
    prompt = make_prompt("Scripted", sampling=Sampling(temperature=1.0, max_new_tokens=500))
    sample = (await play(make_player(renderer, policy), prompt)).to_sample(None)
    assert [turn.tools for turn in sample.turns] == [("zoom", "python", "zoom"), ("\ufffd" + 63 * "x",), ()]
    assert decode(encode(sample), Sample).turns == sample.turns


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
    async with Closings() as closings:
        episode = await make_player(renderer, policy).play(prompt, 0, images, SharedRendering(), closings)
    assert (episode.finish_reason, len(policy.requests)) == ("stop", 2)
    assert await shelf.get(prompt.id.scope, hash_of(PICTURE)) == PICTURE


async def test_images_that_all_samples_find_lost_are_stored_again_once() -> None:
    """A sample whose request is older than the last storing waits for it, and tries again."""
    shelf, prompt = ImageShelf(), make_prompt()
    await shelf.put(prompt.id.scope, PICTURE)
    images = await GroupImages.load(shelf, prompt)
    shelf.images.clear()
    requested_at = time.monotonic()
    await asyncio.gather(*(images.store_again(requested_at) for _ in range(16)))
    assert shelf.num_stored == 2
    await images.store_again(time.monotonic())  # lost once more
    assert shelf.num_stored == 3


async def test_a_group_stores_an_image_once_however_many_samples_show_it(renderer: Renderer) -> None:
    """Sixteen samples in two turns: the prompt's picture and the environment's, each stored once."""
    shelf, prompt = ImageShelf(), make_prompt("TwoTurns")
    await shelf.put(prompt.id.scope, PICTURE)
    images = await GroupImages.load(shelf, prompt)

    async def play_one(number: int, closings: Closings) -> None:
        policy = ScriptedPolicy(renderer, [("one" + END, 4), ("two" + END, 4)])
        await make_player(renderer, policy).play(prompt, number, images, SharedRendering(), closings)

    async with Closings() as closings:
        await asyncio.gather(*(play_one(number, closings) for number in range(16)))
    assert shelf.num_stored == 2


@pytest.mark.parametrize("router_replay", [False, True])
async def test_engines_are_asked_for_the_experts_that_are_not_known_yet(
    renderer: Renderer, router_replay: bool
) -> None:
    """Of every token that is trained, from the first turn's prompt on; of an evaluation's none."""
    turns = [("\\boxed{2}" + END, 4), ("\\boxed{3}" + END, 4)]
    policy, evaluated = ScriptedPolicy(renderer, turns), ScriptedPolicy(renderer, turns)
    played = await play(make_player(renderer, policy, router_replay=router_replay), make_prompt("TwoTurns"))
    [sequence] = played.to_sample(None).sequences
    first, second = policy.requests
    if router_replay:
        computed = len(first.input_ids) + 8 + len(policy.ids(turns[0][0])) - 1
        assert [each.routed_experts_from for each in policy.requests] == [0, computed]
        assert sequence.routed_experts is not None
        assert len(sequence.routed_experts) == len(sequence.token_ids) + 2 * 8 - 1
    else:
        assert sequence.routed_experts is None
    player = make_player(renderer, evaluated, router_replay=router_replay)
    await play(player, make_prompt("TwoTurns", purpose="test", exact_version=4))
    asked = [first, second] if not router_replay else []
    assert not any(each.HasField("routed_experts_from") for each in [*asked, *evaluated.requests])
