"""Thoughts of earlier turns, left out where the model's chat template leaves them out."""

import functools
from pathlib import Path
from typing import Any

import pytest

from models.tiny_qwen3_vl import build_tokenizer
from penstock.errors import ConfigError, PromptTooLongError
from penstock.model.chat.chat_template import Renderer
from penstock.records import Limits, Message, Sampling, TextPart, TokenSequence
from services.rollout.worker.episodes.episode import Episode
from tests.support.worker.scripted_episodes import (
    DONE,
    END,
    SECOND_PICTURE,
    Scripted,
    ScriptedPolicy,
    make_player,
    make_prompt,
    play,
    shows,
)

TEMPLATES = Path(__file__).parents[3] / "data" / "chat_templates"
OPENED = {"qwen3_vl_thinking": {}, "qwen3_5": {}, "qwen3_6": {}, "qwen3_8": {"preserve_thinking": False}}
"""Templates whose generation prompt opens `<think>`, and what makes them drop earlier thoughts."""
THOUGHTFUL = "So 5?\n</think>\n\nIt is 5." + END


@pytest.fixture
def renderer_of(template: str) -> Renderer:
    """The tiny model's vocabulary with the template that the test names."""
    return load(template)


@functools.cache
def load(template: str) -> Renderer:
    """The tiny model's vocabulary with a published template."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    image_id, end_id = tokenizer.convert_tokens_to_ids(["<|image_pad|>", END])
    return Renderer(tokenizer, image_token_id=image_id, end_ids=[end_id])


def rendered(renderer: Renderer, *turns: tuple[Any, str], num_images: int = 1, **kwargs: Any) -> list[int]:
    """What the template itself makes of the prompt and `turns`, each a role and a text."""
    prompt = make_prompt().messages
    rest = [Message(role=role, parts=(TextPart(text=text),)) for role, text in turns]
    return renderer.render_prompt([*prompt, *rest], num_images=num_images, template_kwargs=kwargs)


async def episode_of(template: str, policy: ScriptedPolicy, **config: Any) -> Episode:
    """Play what `Scripted` plays, with thoughts left out."""
    prompt = make_prompt("Scripted", chat_template_kwargs=OPENED[template])
    return await play(make_player(policy.renderer, policy, strip_thinking=True, **config), prompt)


def trained(renderer: Renderer, sequence: TokenSequence) -> str:
    """The text that is trained."""
    ids = [token for token, is_trained in zip(sequence.token_ids, sequence.loss_mask, strict=True) if is_trained]
    return str(renderer._tokenizer.decode(ids))


@pytest.mark.parametrize("template", OPENED)
async def test_a_later_turn_sees_what_the_template_shows_of_earlier_ones(renderer_of: Renderer, template: str) -> None:
    """Over three turns; each turn is trained once, behind exactly the ids that it was sampled behind."""
    policy = ScriptedPolicy(
        renderer_of, [(THOUGHTFUL, 4), ("Hm.\n</think>\n\n6." + END, 5), ("7.\n</think>\n\n7." + END, 6)]
    )
    Scripted.plays(shows("No."), shows("No, no."), DONE)
    episode = await episode_of(template, policy)
    said = [("assistant", "It is 5."), ("user", "No."), ("assistant", "6."), ("user", "No, no.")]
    asked = [list(request.input_ids) for request in policy.requests]
    assert asked == [rendered(renderer_of, *said[:number], **OPENED[template]) for number in (0, 2, 4)]
    sample = episode.to_sample(None)
    assert [trained(renderer_of, sequence) for sequence in sample.sequences] == [text for text, _ in policy.turns]
    for number, (sequence, ids) in enumerate(zip(sample.sequences, asked, strict=True)):
        output = policy.ids(policy.turns[number][0])
        assert sequence.token_ids.tolist() == ids + output
        assert sequence.loss_mask.tolist() == [False] * len(ids) + [True] * len(output)
        assert sequence.logprobs[len(ids) :].tolist() == [-0.25 * (number + 1)] * len(output)
        [span] = sequence.version_spans
        assert (span.policy_version, span.num_tokens) == (4 + number, len(output))
        assert sequence.num_last_turn_tokens == len(output)
    assert [turn.num_output_tokens for turn in sample.turns] == [len(policy.ids(text)) for text, _ in policy.turns]


@pytest.mark.parametrize("template", OPENED)
async def test_thoughts_stay_before_the_reply_of_a_tool(renderer_of: Renderer, template: str) -> None:
    """There the template shows them, so all is one sequence; a user's message then drops those of both turns."""
    policy = ScriptedPolicy(
        renderer_of, [(THOUGHTFUL, 4), ("Hm.\n</think>\n\n6." + END, 4), ("\n</think>\n\n7." + END, 4)]
    )
    Scripted.plays(shows("8", role="tool"), shows("No."), DONE)
    episode = await episode_of(template, policy)
    second, third = (list(request.input_ids) for request in policy.requests[1:])
    first = [*policy.requests[0].input_ids, *policy.ids(THOUGHTFUL)]
    assert second[: len(first)] == first
    said = [("assistant", "It is 5."), ("tool", "8"), ("assistant", "6."), ("user", "No.")]
    assert third == rendered(renderer_of, *said, **OPENED[template])
    sequences = episode.to_sample(None).sequences
    assert [trained(renderer_of, sequence) for sequence in sequences] == [
        policy.turns[0][0] + policy.turns[1][0],
        policy.turns[2][0],
    ]


@pytest.mark.parametrize("template", OPENED)
async def test_a_user_s_message_that_is_a_tool_s_reply_leaves_thoughts(renderer_of: Renderer, template: str) -> None:
    """The templates take it for one by its words."""
    policy = ScriptedPolicy(renderer_of, [(THOUGHTFUL, 4), ("Hm.\n</think>\n\n6." + END, 4)])
    Scripted.plays(shows("<tool_response>8</tool_response>"), DONE)
    episode = await episode_of(template, policy)
    assert len(episode.to_sample(None).sequences) == 1


@pytest.mark.parametrize("template", OPENED)
async def test_thoughts_stay_unless_they_are_to_be_left_out(renderer_of: Renderer) -> None:
    """By default the policy goes on from all that it said."""
    policy = ScriptedPolicy(renderer_of, [(THOUGHTFUL, 4), ("Hm.\n</think>\n\n6." + END, 4)])
    Scripted.plays(shows("No."), DONE)
    episode = await play(make_player(renderer_of, policy), make_prompt("Scripted"))
    first = [*policy.requests[0].input_ids, *policy.ids(THOUGHTFUL)]
    assert policy.requests[1].input_ids[: len(first)] == first
    assert len(episode.to_sample(None).sequences) == 1


@pytest.mark.parametrize("template", ["qwen3_6"])
async def test_a_template_that_is_told_to_keep_thoughts_keeps_them(renderer_of: Renderer) -> None:
    """Row by row."""
    policy = ScriptedPolicy(renderer_of, [(THOUGHTFUL, 4), ("Hm.\n</think>\n\n6." + END, 4)])
    Scripted.plays(shows("No."), DONE)
    prompt = make_prompt("Scripted", chat_template_kwargs={"preserve_thinking": True})
    episode = await play(make_player(renderer_of, policy, strip_thinking=True), prompt)
    assert len(episode.to_sample(None).sequences) == 1


@pytest.mark.parametrize("template", ["qwen3_5", "qwen3_5_small"])
async def test_the_empty_thoughts_of_a_generation_prompt_are_left_out_too(renderer_of: Renderer) -> None:
    """With `enable_thinking` false the prompt closes `<think>` at once, and earlier turns have no such mark."""
    policy = ScriptedPolicy(renderer_of, [("It is 5." + END, 4), ("6." + END, 4)])
    Scripted.plays(shows("No."), DONE)
    prompt = make_prompt("Scripted", chat_template_kwargs={"enable_thinking": False})
    episode = await play(make_player(renderer_of, policy, strip_thinking=True), prompt)
    said = [("assistant", "It is 5."), ("user", "No.")]
    assert policy.requests[1].input_ids == rendered(renderer_of, *said, enable_thinking=False)
    assert len(episode.to_sample(None).sequences) == 2


@pytest.mark.parametrize("template", OPENED)
@pytest.mark.parametrize("end", [END, ""])
async def test_a_turn_that_never_stopped_thinking_said_nothing(renderer_of: Renderer, template: str, end: str) -> None:
    """Whether or not it ended itself."""
    policy = ScriptedPolicy(renderer_of, [(f"So 5? Or 6{end}", 4), ("Hm.\n</think>\n\n6." + END, 4)])
    Scripted.plays(shows("No."), DONE)
    await episode_of(template, policy)
    assert policy.requests[1].input_ids == rendered(renderer_of, ("assistant", ""), ("user", "No."), **OPENED[template])


@pytest.mark.parametrize("template", ["qwen3_vl_thinking"])
async def test_an_end_behind_thoughts_that_were_left_out_keeps_the_turns_before(
    renderer_of: Renderer, template: str
) -> None:
    """What the policy saw last, and no longer answered, is no sequence."""
    policy = ScriptedPolicy(renderer_of, [(THOUGHTFUL, 4), PromptTooLongError("it is full")])
    Scripted.plays(shows("No."))
    sample = (await episode_of(template, policy)).to_sample(None)
    assert sample.finish_reason == "length"
    assert [trained(renderer_of, sequence) for sequence in sample.sequences] == [THOUGHTFUL]


@pytest.mark.parametrize("template", ["qwen3_vl_thinking", "qwen3_5", "qwen3_6"])
async def test_thoughts_end_where_the_template_ends_them(renderer_of: Renderer, template: str) -> None:
    """At the last of several marks."""
    twice = "So 5?\n</think>\n\nOr 6?\n</think>\n\nIt is 5." + END
    policy = ScriptedPolicy(renderer_of, [(twice, 4), ("\n</think>\n\n6." + END, 4)])
    Scripted.plays(shows("No."), DONE)
    await episode_of(template, policy)
    assert policy.requests[1].input_ids == rendered(renderer_of, ("assistant", "It is 5."), ("user", "No."))


@pytest.mark.parametrize("template", OPENED)
async def test_pictures_stay(renderer_of: Renderer, template: str) -> None:
    """Each sequence names those that it shows."""
    policy = ScriptedPolicy(
        renderer_of, [(THOUGHTFUL, 4), ("\n</think>\n\n6." + END, 4), ("\n</think>\n\n7." + END, 4)]
    )
    Scripted.plays(shows("Look.", SECOND_PICTURE), shows("No."), DONE)
    episode = await episode_of(template, policy)
    sequences = episode.to_sample(None).sequences
    assert [len(sequence.images) for sequence in sequences] == [1, 2, 2]
    assert [len(request.images) for request in policy.requests] == [1, 2, 2]


@pytest.mark.parametrize("template", ["qwen3_vl_thinking"])
async def test_thoughts_that_are_left_out_take_no_room(renderer_of: Renderer) -> None:
    """An episode that would not fit with them goes on without."""

    async def finish_reason(**config: Any) -> str:
        policy = ScriptedPolicy(renderer_of, [("5? " * 40 + THOUGHTFUL, 4), ("Hm.\n</think>\n\n6." + END, 4)])
        Scripted.plays(shows("No."), DONE)
        first_turn = len(rendered(renderer_of)) + 8 + len(policy.ids(policy.turns[0][0]))
        prompt = make_prompt(
            "Scripted",
            limits=Limits(max_tokens=first_turn + 16),
            sampling=Sampling(temperature=0.5, max_new_tokens=first_turn),
        )
        return (await play(make_player(renderer_of, policy, **config), prompt)).finish_reason

    assert await finish_reason() == "length"
    assert await finish_reason(strip_thinking=True) == "stop"


@pytest.mark.parametrize("template", ["qwen2_5_vl", "qwen3_vl_instruct"])
def test_a_template_that_never_leaves_thoughts_out_is_refused(renderer_of: Renderer) -> None:
    """When the worker starts."""
    with pytest.raises(
        ConfigError, match=r"worker\.strip_thinking = true, but the chat template .* keeps the thoughts"
    ):
        make_player(renderer_of, ScriptedPolicy(renderer_of, []), strip_thinking=True)
