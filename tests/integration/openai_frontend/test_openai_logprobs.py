"""Logprobs of answers and prompts: likeliest tokens, echoed prompts, prompts that are only scored."""

from typing import Any

import openai
import pytest

from tests.support.router.openai_harness import Harness, collect

PROMPT = "ab"


async def complete(harness: Harness, **options: Any) -> Any:
    """Ask the first router for a completion."""
    return await harness.client.completions.create(**{"model": harness.run, "prompt": PROMPT, **options})


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_likeliest_tokens_of_a_chat(harness: Harness, is_streamed: bool) -> None:
    """As many as were asked for, likeliest first, each with its bytes."""
    ids = harness.says("ab")
    answer = await harness.chat(logprobs=True, top_logprobs=2, stream=is_streamed)
    if is_streamed:
        choices = [choice for chunk in await collect(answer) for choice in chunk.choices]
        content = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    else:
        content = answer.choices[0].logprobs.content
    assert len(content) == len(ids)
    first = content[0]
    assert [(each.token, each.logprob) for each in first.top_logprobs] == [("a", -1 / 64), ("b", -1 / 64 - 1)]
    assert bytes(first.top_logprobs[1].bytes) == b"b"
    assert all(request.num_top_logprobs == 2 for request in harness.requests)


async def test_likeliest_tokens_of_a_completion_include_the_sampled_one(harness: Harness) -> None:
    """By text; `0` has the sampled one only."""
    harness.says("xy")
    answer = await complete(harness, logprobs=2, max_tokens=2)
    assert answer.choices[0].logprobs.top_logprobs == [
        {"x": -1 / 64, "y": -1 / 64 - 1},
        {"y": -2 / 64, "z": -2 / 64 - 1},
    ]
    answer = await complete(harness, logprobs=0, max_tokens=1)
    assert answer.choices[0].logprobs.top_logprobs == [{"x": -1 / 64}]


async def test_tokens_are_named_by_their_ids_if_asked(harness: Harness) -> None:
    """Where texts are ambiguous."""
    [first, *_] = harness.says("xy")
    answer = await complete(harness, logprobs=1, max_tokens=1, extra_body={"return_tokens_as_token_ids": True})
    assert answer.choices[0].logprobs.tokens == [f"token_id:{first}"]
    chat = await harness.chat(logprobs=True, extra_body={"return_tokens_as_token_ids": True})
    assert chat.choices[0].logprobs.content[0].token == f"token_id:{first}"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_echoed_prompt_stands_before_the_answer_with_its_logprobs(harness: Harness, is_streamed: bool) -> None:
    """Its first token has none, since it follows nothing; offsets count from the prompt's beginning."""
    harness.says("cd")
    answer = await complete(harness, echo=True, logprobs=1, max_tokens=2, stream=is_streamed)
    fields: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text = ""
    for part in await collect(answer) if is_streamed else [answer]:
        [choice] = part.choices
        text += choice.text
        for name, values in fields.items():
            values += getattr(choice.logprobs, name) if choice.logprobs else []
    assert text == "abcd"
    assert fields["tokens"] == ["a", "b", "c", "d"]
    assert fields["token_logprobs"] == [None, -1 / 32, -1 / 64, -2 / 64]
    assert fields["top_logprobs"] == [None, {"b": -1 / 32}, {"c": -1 / 64}, {"d": -2 / 64}]
    assert fields["text_offset"] == [0, 1, 2, 3]


async def test_a_prompt_is_echoed_for_each_of_its_choices_and_not_scored_unasked(harness: Harness) -> None:
    """Texts and ids alike."""
    harness.says("cd")
    ids = harness.renderer.render_text("xy")
    answer = await complete(harness, prompt=[ids, ids], echo=True, n=2, max_tokens=1)
    assert [choice.text for choice in answer.choices] == ["xyc"] * 4
    assert not any(request.prompt_logprobs for request in harness.requests)


async def test_a_prompt_can_be_scored_without_an_answer(harness: Harness) -> None:
    """max_tokens 0, as evaluations by likelihood send it: one token is made and dropped."""
    harness.says("cd")
    answer = await complete(harness, echo=True, logprobs=1, max_tokens=0)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("ab", "length")
    assert choice.logprobs.token_logprobs == [None, -1 / 32]
    assert answer.usage.completion_tokens == 0
    assert [request.sampling.max_new_tokens for request in harness.requests] == [1]


async def test_prompt_logprobs_have_vllms_form(harness: Harness) -> None:
    """For each id after the first: itself and the likeliest, by id, with ranks."""
    harness.says("cd")
    a, b = harness.renderer.render_text("ab")
    answer = await complete(harness, max_tokens=1, extra_body={"prompt_logprobs": 2})
    assert answer.choices[0].prompt_logprobs == [
        None,
        {
            str(b): {"logprob": -1 / 32, "rank": 1, "decoded_token": "b"},
            str(b + 1): {"logprob": -1 / 32 - 1, "rank": 2, "decoded_token": "c"},
        },
    ]
    assert list(harness.requests[0].input_ids) == [a, b]
    chat = await harness.chat(extra_body={"prompt_logprobs": 0})
    assert len(chat.prompt_logprobs) == len(harness.requests[-1].input_ids)
    assert all(len(entry) == 1 for entry in chat.prompt_logprobs[1:])


async def test_an_engine_that_does_not_score_the_prompt_is_reported(harness: Harness) -> None:
    """Nothing is made up."""
    for engine in harness.engines:
        engine.scores = False
    with pytest.raises(openai.InternalServerError, match="did not score the prompt"):
        await complete(harness, echo=True, logprobs=1)


TOO_MANY = {
    "chat": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    "without logprobs": ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs"),
    "prompt": ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs", "less than or equal to 20"),
    "negative": ({"extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs", "greater than or equal to 0"),
}


@pytest.mark.parametrize("name", TOO_MANY)
async def test_more_than_engines_report_is_refused(harness: Harness, name: str) -> None:
    """By name."""
    options, param, message = TOO_MANY[name]
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        await harness.chat(**options)
    assert caught.value.param == param
