"""What other servers' clients may say of prompts and ends: template variables, continued messages, stop tokens."""

from typing import Any

import httpx
import openai
import pytest

from tests.support.router.openai_harness import END_ID, HI, PNG, Harness, collect, data_url, text_of

BEGUN = [*HI, {"role": "assistant", "content": "The answer"}]


async def test_a_begun_message_is_continued(harness: Harness) -> None:
    """The prompt ends with it, tokenised apart, as an engine's own tokens are; the answer is what follows."""
    harness.says(" is 5")
    answer = await harness.chat(BEGUN, extra_body={"continue_final_message": True, "add_generation_prompt": False})
    assert answer.choices[0].message.content == " is 5"
    await harness.chat(HI)
    begun, plain = (
        harness.requests if len(harness.engines[0].requests) != 1 else (harness.requests[0], harness.requests[1])
    )
    longer, shorter = sorted((list(begun.input_ids), list(plain.input_ids)), key=len, reverse=True)
    assert longer == [*shorter, *harness.renderer.render_text("The answer")]


async def test_variables_reach_the_template(harness: Harness) -> None:
    """Reserved ones are refused by name."""
    await harness.chat(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert len(harness.requests) == 1
    endless = "{% for a in range(9999999) %}{% for b in range(9999999) %}{% endfor %}{% endfor %}"
    for reserved in ({"tools": []}, {"chat_template": endless}, {"truncation": True, "max_length": 3}):
        with pytest.raises(openai.BadRequestError, match="reserved"):
            await harness.chat(extra_body={"chat_template_kwargs": reserved})


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_that_ignores_ends_has_all_its_tokens(harness: Harness, is_streamed: bool) -> None:
    """As load generators ask; min_tokens = max_tokens is the same."""
    harness.says("ab")
    for options in ({"ignore_eos": True}, {"min_tokens": 9}):
        answer = await harness.chat(
            max_tokens=9, stream=is_streamed, extra_body=options, **({"stream_options": USAGE} if is_streamed else {})
        )
        last = (await collect(answer))[-1] if is_streamed else answer
        assert last.usage.completion_tokens == 9
    assert all(request.sampling.ignore_end for request in harness.requests)


USAGE = {"include_usage": True}


async def test_counts_come_with_each_chunk_if_asked(harness: Harness) -> None:
    """And grow."""
    ids = harness.says("abc")
    options = {**USAGE, "continuous_usage_stats": True}
    chunks = await collect(await harness.chat(stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(ids)
    assert len(set(counts)) > 2


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("word", ["include_stop_str_in_output", "no_stop_trim"])
async def test_the_stop_text_is_part_of_the_text_if_asked(harness: Harness, word: str, is_streamed: bool) -> None:
    """In vLLM's word and in SGLang's; the answer says which text it was."""
    harness.says("one END two")
    answer = await harness.chat(stop=["END"], stream=is_streamed, extra_body={word: True})
    if is_streamed:
        chunks = await collect(answer)
        text, last = text_of(chunks), chunks[-1].choices[0]
    else:
        [last] = answer.choices
        text = last.message.content
    assert (text, last.finish_reason, last.stop_reason, last.matched_stop) == ("one END", "stop", "END", "END")


async def test_what_ended_an_answer_is_told(harness: Harness) -> None:
    """SGLang's word tells of the model's own stop tokens, vLLM's of those in the request only; a limit is none."""
    harness.says("ab")
    [own] = (await harness.chat()).choices
    [asked] = (await harness.chat(extra_body={"stop_token_ids": [END_ID]})).choices
    [cut] = (await harness.chat(max_tokens=1)).choices
    assert (own.matched_stop, own.stop_reason) == (END_ID, None)
    assert (asked.matched_stop, asked.stop_reason) == (END_ID, END_ID)
    assert (cut.matched_stop, cut.stop_reason, cut.finish_reason) == (None, None, "length")


async def test_only_the_end_of_a_prompt_is_kept_if_asked(harness: Harness) -> None:
    """Of texts, not of prompts with images."""
    ids = harness.renderer.render_text("abcdef")
    await harness.client.completions.create(
        model=harness.run, prompt="abcdef", extra_body={"truncate_prompt_tokens": 2}
    )
    assert list(harness.requests[0].input_ids) == ids[-2:]
    shown = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(PNG)}}]}]
    with pytest.raises(openai.BadRequestError, match="has 1 images"):
        await harness.chat(shown, extra_body={"truncate_prompt_tokens": 2})


async def test_tokens_of_texts_and_conversations(harness: Harness) -> None:
    """The ids that a call would have, and back; special tokens are spelled."""
    async with harness.http() as client:
        text = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
        assert text["tokens"] == harness.renderer.render_text("hé")
        assert text["count"] == len(text["tokens"]) == len(text["token_strs"])
        back = (await client.post("/detokenize", json={"tokens": [*text["tokens"], END_ID]})).json()
        assert back == {"prompt": "hé<|im_end|>", "text": "hé<|im_end|>"}
        chat = (await client.post("/v1/tokenize", json={"model": harness.run, "messages": HI})).json()
        await harness.chat(HI)
        assert chat["tokens"] == list(harness.requests[0].input_ids)
        assert (await client.post("/tokenize", json={"prompt": "x", "model": "other"})).status_code == 404
        both = await client.post("/tokenize", json={"prompt": "x", "messages": HI})
        assert "either prompt or messages" in both.json()["error"]["message"]
        assert (await client.get("/ping")).status_code == 200


@pytest.mark.parametrize("given", [{"prompt": "x"}, {"messages": HI}])
async def test_tokens_are_those_of_a_chat_that_is_answered(harness: Harness, given: dict[str, Any]) -> None:
    """vLLM's words for it are accepted, and refused by name where they say something else."""
    async with harness.http() as client:

        async def tokenize(**options: object) -> httpx.Response:
            return await client.post("/tokenize", json={**given, **options})

        plain = await tokenize()
        same = await tokenize(add_generation_prompt=True, continue_final_message=False)
        assert (same.status_code, same.json()) == (200, plain.json())
        for name, value in [
            ("add_generation_prompt", False),
            ("add_generation_prompt", "false"),
            ("continue_final_message", True),
        ]:
            refused = await tokenize(**{name: value})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, name)
            assert "is not supported" in error["message"]


REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "min_tokens": ({"max_tokens": 9, "extra_body": {"min_tokens": 3}}, "min_tokens", "make them equal"),
    "ends": ({"extra_body": {"ignore_eos": True, "stop_token_ids": [5]}}, "ignore_eos", "both set; leave one out"),
    "whole answer": ({"extra_body": {"stream_options": USAGE}}, "stream_options", "for streams only"),
    "template": ({"extra_body": {"chat_template": "x"}}, "chat_template", "chat_template_kwargs"),
    "nothing begun": ({"extra_body": {"continue_final_message": True}}, "continue_final_message", "of the assistant"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_done_is_refused_by_name(harness: Harness, name: str) -> None:
    """With what to do instead."""
    options, param, message = REFUSED[name]
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        await harness.chat(**options)
    assert caught.value.param == param
    assert harness.requests == []


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_reasoning_is_told_from_what_is_said_if_asked(harness: Harness, is_streamed: bool) -> None:
    """Under SGLang's and DeepSeek's name; without the question it stays in the text."""
    said = "<think>\n2 + 3\n</think>\n\nIt is 5"
    harness.says(said)
    answer = await harness.chat(stream=is_streamed, extra_body={"separate_reasoning": True})
    if is_streamed:
        chunks = await collect(answer)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        content = text_of(chunks)
    else:
        message = answer.choices[0].message
        reasoning, content = message.reasoning_content, message.content
    assert (reasoning, content) == ("2 + 3", "It is 5")
    plain = await harness.chat()
    assert plain.choices[0].message.content == said
