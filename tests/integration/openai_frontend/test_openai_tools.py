"""Tools: what the policy sees of them, how its calls come back, and what agents send along."""

import json
from typing import Any

import pytest

from penstock.records import Message, TextPart
from tests.support.router.openai_harness import HI, PNG, Harness, collect, data_url, text_of

TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}


async def test_messages_of_agents_are_taken_with_what_they_carry(harness: Harness) -> None:
    """Names, indices of streams, other servers' fields and empty turns: what the policy neither sees nor needs."""
    said = {"function": {"name": "add", "arguments": "{}"}, "index": 0, "type": "function", "id": "call_1"}
    assistant = {
        "role": "assistant",
        "content": None,
        "tool_calls": [said],
        "reasoning_content": "hm",
        "provider_specific_fields": {"refusal": None},
    }
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    image = {"type": "image_url", "image_url": {"url": data_url(PNG)}, "uuid": "u"}
    messages = [
        {"role": "system", "content": "Be brief.", "name": "system"},
        {"role": "user", "content": [part, image], "name": "bob"},
        assistant,
        {"role": "tool", "tool_call_id": "call_1", "content": "2", "name": "add"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"role": "user", "content": "Go on."},
    ]
    await harness.chat(messages, tools=[TOOL])
    [request] = harness.requests
    prompt = harness.renderer.decode(request.input_ids)
    assert "I cannot." in prompt
    assert "bob" not in prompt


async def test_strict_tools_are_taken(harness: Harness) -> None:
    """Frameworks send it by default; the policy is not constrained by it."""
    function = {**TOOL["function"], "strict": True}
    await harness.chat(tools=[{"type": "function", "function": function}])
    [request] = harness.requests
    assert "strict" not in harness.renderer.decode(request.input_ids)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_without_parallel_calls_ends_with_its_first(harness: Harness, is_streamed: bool) -> None:
    """In the engine too; what the policy would have said after it is cut."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    ids = harness.says(f"I add.\n{call}\n{call}")
    num_first = len(harness.renderer.render_text(f"I add.\n{call}"))
    answer = await harness.chat(
        tools=[TOOL], stream=is_streamed, parallel_tool_calls=False, extra_body={"return_token_ids": True}
    )
    if is_streamed:
        chunks = await collect(answer)
        calls = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or []]
        token_ids = [number for chunk in chunks for number in getattr(chunk.choices[0], "token_ids", None) or []]
        reason = chunks[-1].choices[0].finish_reason
    else:
        [choice] = answer.choices
        calls, token_ids, reason = choice.message.tool_calls, choice.token_ids, choice.finish_reason
    assert len(calls) == 1
    assert reason == "tool_calls"
    assert token_ids == ids[:num_first]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_tools_are_told_of_and_calls_are_told_apart(harness: Harness, is_streamed: bool) -> None:
    """In Qwen's form; the answer's text is what stands beside them."""
    harness.says('I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    answer = await harness.chat(tools=[TOOL], stream=is_streamed)
    prompt = harness.renderer._tokenizer.decode(harness.requests[0].input_ids)
    assert json.dumps(TOOL) in prompt
    if is_streamed:
        chunks = await collect(answer)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        content, reason = text_of(chunks), chunks[-1].choices[0].finish_reason
        [call] = [call for delta in deltas for call in delta.tool_calls or []]
        assert call.index == 0
    else:
        [choice] = answer.choices
        content, reason = choice.message.content, choice.finish_reason
        [call] = choice.message.tool_calls
    assert (content, reason) == ("I add.", "tool_calls")
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", {"a": 1})
    assert call.id.startswith("call_")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_calls_inside_of_thoughts_are_text(harness: Harness, is_streamed: bool) -> None:
    """The policy considers them; what it calls stands behind its thoughts."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    thoughts = f"<think>\nI could {call}, no.\n</think>"
    for text, num_calls in ((f"{thoughts}\n\n{call}", 1), (thoughts, 0)):
        harness.says(text)
        answer = await harness.chat(tools=[TOOL], stream=is_streamed, max_tokens=300)
        if is_streamed:
            chunks = await collect(answer)
            content = text_of(chunks)
            calls = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or []]
        else:
            content, calls = answer.choices[0].message.content, answer.choices[0].message.tool_calls or []
        assert (content, len(calls)) == (thoughts, num_calls)


async def test_what_a_tool_said_goes_into_the_next_prompt(harness: Harness) -> None:
    """The client's own message objects come back as they are."""
    harness.says('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    first = await harness.chat(tools=[TOOL])
    message = first.choices[0].message
    assert message.content is None
    tool = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}
    harness.says("It is 2")
    second = await harness.chat([*HI, message, tool], tools=[TOOL])
    assert second.choices[0].message.content == "It is 2"
    prompt = harness.renderer._tokenizer.decode(harness.requests[-1].input_ids)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert f"{call}\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>" in prompt


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_calls_that_no_text_can_carry_are_mended(harness: Harness, is_streamed: bool) -> None:
    """Half a character in an escape becomes U+FFFD, in what the policy calls and in what a client says it called."""
    harness.says(r'<tool_call>{"name": "add", "arguments": {"a": "x\ud83d"}}</tool_call>')
    answer = await harness.chat(tools=[TOOL], stream=is_streamed)
    if is_streamed:
        [call] = [call for chunk in await collect(answer) for call in chunk.choices[0].delta.tool_calls or []]
    else:
        [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": "x\ufffd"}
    said = {"type": "function", "id": call.id, "function": {"name": "add", "arguments": r'{"a": "y\ud83d"}'}}
    await harness.chat([*HI, {"role": "assistant", "tool_calls": [said]}, *HI], tools=[TOOL], stream=False)
    assert '{"a": "y\ufffd"}' in harness.renderer._tokenizer.decode(harness.requests[-1].input_ids)


async def test_tools_that_are_not_to_be_used_are_not_told_of(harness: Harness) -> None:
    """tool_choice none: text stays text."""
    harness.says("<tool_call>{}</tool_call>")
    answer = await harness.chat(tools=[TOOL], tool_choice="none")
    assert answer.choices[0].message.content == "<tool_call>{}</tool_call>"
    assert list(harness.requests[0].input_ids) == harness.renderer.render_prompt(
        [Message(role="user", parts=(TextPart(text="hi"),))], num_images=0
    )
