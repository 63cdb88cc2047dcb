"""Forms that an answer must have: schemas, patterns and grammars, which the engine keeps, and calls that are begun."""

import asyncio
import json
from typing import Any

import openai
import pytest

from penstock.rpc.channel import connect
from penstock.v1 import router_pb2, router_pb2_grpc
from tests.support.router.openai_harness import END_ID, HI, Harness, collect
from tests.support.router.openai_tools import ADD, MULTIPLY

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "object": ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
        "json_schema",
        json.dumps(SCHEMA),
    ),
    "vLLM's json": ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, "json_schema", json.dumps(SCHEMA)),
    "vLLM's object": (
        {"extra_body": {"structured_outputs": {"json_object": True}}},
        "json_schema",
        '{"type": "object"}',
    ),
    "vLLM's regex": ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "regex", "a+"),
    "vLLM's choice": (
        {"extra_body": {"structured_outputs": {"choice": ['a"b', "é"]}}},
        "ebnf",
        r'root ::= "a\"b" | "é"',
    ),
    "vLLM's older json": ({"extra_body": {"guided_json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
    "vLLM's older choice": ({"extra_body": {"guided_choice": ["a"]}}, "ebnf", 'root ::= "a"'),
    "SGLang's regex": ({"extra_body": {"regex": "a+"}}, "regex", "a+"),
    "SGLang's ebnf": ({"extra_body": {"ebnf": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
    "SGLang's schema": ({"extra_body": {"json_schema": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA)),
}


@pytest.mark.parametrize("name", FORMS)
async def test_the_engine_is_told_of_the_form(harness: Harness, name: str) -> None:
    """In each server's words."""
    options, form, value = FORMS[name]
    await harness.chat(**options)
    [request] = harness.requests
    assert request.sampling.constraint.WhichOneof("form") == form
    assert getattr(request.sampling.constraint, form) == value


async def test_any_text_is_no_form(harness: Harness) -> None:
    """And completions may have one."""
    await harness.chat(response_format={"type": "text"})
    await harness.client.completions.create(model=harness.run, prompt="x", extra_body={"regex": "a"})
    forms = {request.sampling.constraint.WhichOneof("form") for request in harness.requests}
    assert forms == {None, "regex"}


REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "unknown": ({"response_format": {"type": "grammar"}}, "response_format", "'grammar'"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    "not a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 5}}},
        "response_format.json_schema.schema",
        "dict",
    ),
    "two": (
        {"response_format": {"type": "json_object"}, "extra_body": {"regex": "a"}},
        "response_format",
        "both set; send one",
    ),
    "two of vLLM's": (
        {"extra_body": {"structured_outputs": {"regex": "a", "json_object": True}}},
        "structured_outputs",
        "sets 2 forms",
    ),
    "none of vLLM's": ({"extra_body": {"structured_outputs": {}}}, "structured_outputs", "sets 0 forms"),
    "two of SGLang's": ({"extra_body": {"regex": "a", "ebnf": "b"}}, "regex", "several forms"),
    "two of one kind": ({"extra_body": {"ebnf": "a", "guided_grammar": "b"}}, "ebnf", "several forms"),
    "recorded": (
        {"response_format": {"type": "json_object"}, "user": "u", "extra_body": {"record": True}},
        "response_format",
        "not the policy's own",
    ),
    "no such tool": (
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        "tool_choice",
        "'sub', which is not among the tools",
    ),
    "no tools": ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    "no choice": ({"tools": [ADD], "tool_choice": "perhaps"}, "tool_choice", "'perhaps'"),
    "tool and form": (
        {"tools": [ADD], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
        "exclude each other",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_no_form_is_refused_by_name(harness: Harness, name: str) -> None:
    """And no engine is asked."""
    options, param, message = REFUSED[name]
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        await harness.chat(**options)
    assert caught.value.param == param
    assert harness.requests == []


async def test_a_constrained_stream_is_not_continued_by_another_engine(harness: Harness) -> None:
    """Its grammar would begin anew; the error says to ask again."""
    harness.says("abcdef")
    for engine in harness.engines:
        engine.fail_after = 3
    with pytest.raises(openai.APIError, match="cannot be continued") as caught:
        await harness.chat_to_the_end(stream=True, response_format={"type": "json_object"})
    assert caught.value.code == "unavailable"


async def test_a_constrained_answer_that_is_no_stream_starts_over(harness: Harness) -> None:
    """On another engine, whole: the client has had nothing of it."""
    harness.says("abcdef")
    harness.engines[0].fail_after = 3
    for engine in harness.engines:
        engine.token_s = 0.02  # so that calls meet, and each engine has some
    form = {"type": "json_object"}
    answers = await asyncio.gather(*(harness.chat(response_format=form, logprobs=True) for _ in range(12)))
    assert {answer.choices[0].message.content for answer in answers} == {"abcdef"}
    assert {len(answer.choices[0].logprobs.content) for answer in answers} == {answers[0].usage.completion_tokens}
    assert any(request.request_id.endswith("#1") for request in harness.requests)


async def test_a_lost_constrained_stream_is_blamed_on_the_engine_that_lost_it(harness: Harness) -> None:
    """No other engine is asked for the rest, so none is taken for failing, and other calls find it at once."""
    harness.says("abcdef")
    failing, *sound = harness.engines
    failing.fail_after = 3
    for engine in harness.engines:
        engine.token_s = 0.02  # so that calls meet, and each engine has some
    calls = [harness.chat_to_the_end(stream=True, response_format={"type": "json_object"}) for _ in range(12)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert {isinstance(answer, openai.APIError) for answer in answers} == {True, False}
    async with connect(harness.routers[0].address) as channel:
        pool = await router_pb2_grpc.RouterServiceStub(channel).ListReplicas(router_pb2.ListReplicasRequest())
    breakers = {each.replica.replica_id: each.breaker for each in pool.replicas}
    assert {breakers[each.replica_id] for each in sound} == {router_pb2.BREAKER_STATE_CLOSED}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_a_call_is_begun_for_the_policy(harness: Harness, choice: Any, is_streamed: bool) -> None:
    """Up to what it decides; the answer has the whole call. What was begun is part of the recorded prompt."""
    ids = [*harness.renderer.render_text(' {"a": 1}}\n</tool_call>'), END_ID]
    for engine in harness.engines:
        engine.answer = type(engine.answer)(ids)
    answer = await harness.chat(tools=[ADD], tool_choice=choice, stream=is_streamed)
    if is_streamed:
        chunks = await collect(answer)
        [call] = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        reason = chunks[-1].choices[0].finish_reason
    else:
        [call] = answer.choices[0].message.tool_calls
        reason = answer.choices[0].finish_reason
        assert answer.choices[0].message.content is None
    assert (call.function.name, json.loads(call.function.arguments), reason) == ("add", {"a": 1}, "tool_calls")
    prompt = harness.renderer.decode(harness.requests[0].input_ids)
    assert prompt.endswith('assistant\n<tool_call>\n{"name": "add", "arguments":')


async def test_of_several_tools_the_policy_chooses_one(harness: Harness) -> None:
    """The beginning ends where the name begins."""
    harness.says('multiply", "arguments": {"a": 2}}\n</tool_call>')
    answer = await harness.chat(tools=[ADD, MULTIPLY], tool_choice="required")
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "multiply"
    assert harness.renderer.decode(harness.requests[0].input_ids).endswith('<tool_call>\n{"name": "')


async def test_a_named_function_is_called_once(harness: Harness) -> None:
    """As with OpenAI; further calls are cut."""
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    harness.says(f" {{}}}}\n</tool_call>\n{call}\n{call}")
    named = {"type": "function", "function": {"name": "add"}}
    answer = await harness.chat(HI, tools=[ADD], tool_choice=named)
    assert len(answer.choices[0].message.tool_calls) == 1


async def test_what_is_begun_and_not_ended_stays_text(harness: Harness) -> None:
    """With its beginning: nothing is lost."""
    harness.says(" I will not")
    answer = await harness.chat(tools=[ADD], tool_choice="required")
    assert answer.choices[0].message.content == '<tool_call>\n{"name": "add", "arguments": I will not'
    assert answer.choices[0].message.tool_calls is None
