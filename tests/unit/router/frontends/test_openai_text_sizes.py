"""Requests are measured before anything is made of them: what is long waits with what is long, and what cannot fit is
refused."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import SamplingConfig
from services.router.frontends.openai.errors import ParameterError, TextTooLongError
from services.router.frontends.openai.parsing.text_sizes import LONG_BYTES, size_of_completion, size_to_parse
from services.router.frontends.openai.request_parser import RequestParser
from services.router.frontends.openai.schema.requests import ChatRequest, CompletionRequest
from services.router.tuning import OpenAITuning

HI = {"role": "user", "content": "hi"}
UNASKED = {"render_prompt": None, "render_text": None, "call_format": "hermes", "takes_tools": True}
"""A renderer that fails if it is asked to render."""


def tool(description: object, name: str = "add") -> Any:
    return {"type": "function", "function": {"name": name, "description": description}}


def called(name: str) -> Any:
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": "{}"}}]}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [HI], **fields})


def completion(prompt: Any, **fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": prompt, **fields})


def parser(context_length: int) -> RequestParser:
    """A parser that renders nothing; no token has more than 8 bytes."""
    renderer: Any = SimpleNamespace(**UNASKED)
    return RequestParser(
        OpenAITuning(), SamplingConfig(), renderer, longest_token_bytes=8, context_length=lambda: context_length
    )


def parse_chat(context_length: int, **fields: Any) -> None:
    parser(context_length).parse_chat(chat(**fields), session_id="", is_recorded=False)


def ids_of(context_length: int, prompt: Any, **fields: Any) -> list[list[int]]:
    """The ids of the prompts of a completion."""
    body = completion(prompt, **fields)
    parsed = parser(context_length).parse_completion(body, session_id="", is_recorded=False)
    return [list(each.input_ids) for each in parsed.prompts]


@pytest.mark.parametrize(
    "make",
    [
        lambda text: {"messages": [{"role": "user", "content": text}]},
        lambda text: {"messages": [HI, called(text), HI]},
        lambda text: {"tools": [tool(text)]},
        lambda text: {"tools": [tool("", name=text)]},
        lambda text: {"chat_template_kwargs": {"today": text}},
        lambda text: {"chat_template_kwargs": {"facts": [{text: 1}]}},
        lambda text: {"response_format": {"type": "json_schema", "json_schema": {"schema": {"title": text}}}},
        lambda text: {"guided_choice": [text]},
    ],
)
def test_all_text_that_is_read_makes_a_chat_long(make: Any) -> None:
    """Wherever it stands: it is rendered, tokenised or written with the prompt."""
    assert size_to_parse(chat(**make("é" * (LONG_BYTES // 2)))) >= LONG_BYTES
    assert size_to_parse(chat(**make("é" * (LONG_BYTES // 4)))) < LONG_BYTES


@pytest.mark.parametrize(("num_images", "is_long"), [(1, False), (2, True)])
def test_images_make_a_prompt_long(*, num_images: int, is_long: bool) -> None:
    """Their base64 is decoded and hashed with it: 1 MiB of it takes as long as 64 KiB of text."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "a" * 2**19}}
    content = [{"type": "text", "text": "look"}, *[image] * num_images]
    assert (size_to_parse(chat(messages=[{"role": "user", "content": content}])) >= LONG_BYTES) is is_long


def test_a_short_chat_counts_its_text_alone() -> None:
    """Not what JSON puts around it."""
    assert size_to_parse(chat()) == 2


@pytest.mark.parametrize("prompt", [[7] * (LONG_BYTES // 4), [[7] * (LONG_BYTES // 8)] * 2, ["x" * LONG_BYTES]])
def test_ids_and_texts_make_a_completion_long(prompt: Any) -> None:
    """Ids are checked and packed, all prompts of a request together."""
    assert size_of_completion(completion(prompt)) == LONG_BYTES


def test_many_small_items_are_counted_until_they_make_a_chat_long() -> None:
    """They are counted in the event loop, where a whole body of them would take seconds."""
    many = [["a"] * 9] * LONG_BYTES
    for fields in ({"chat_template_kwargs": {"x": many}}, {"tools": [tool("a")] * LONG_BYTES}):
        assert LONG_BYTES <= size_to_parse(chat(**fields)) < 2 * LONG_BYTES


def test_deep_variables_are_measured() -> None:
    """However deep JSON is nested."""
    deep: Any = "a"
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    assert size_to_parse(chat().model_copy(update={"chat_template_kwargs": {"x": deep}})) < LONG_BYTES


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {"messages": [HI, called("f" * 800), HI]}),
        ("tools", {"tools": [tool("x" * 801)]}),
        ("tools", {"tools": [tool("")] * 300}),
    ],
)
def test_text_beside_that_of_messages_is_refused_by_its_size(param: str, fields: Any) -> None:
    """Names of calls and tools are printed, and would be rendered for minutes in one of few threads."""
    with pytest.raises(TextTooLongError, match=f"^{param} has .* more than fit into the context of 100") as caught:
        parse_chat(100, **fields)
    assert caught.value.param == param


def test_tools_that_the_policy_does_not_see_may_be_long() -> None:
    """They take no place in its context."""
    with pytest.raises(TypeError):  # the renderer's, which is asked
        parse_chat(100, tools=[tool("x" * 801)], tool_choice="none")


@pytest.mark.parametrize("prompt", [[-1] * 101, [[1], [-1] * 101]])
def test_ids_that_cannot_fit_are_refused_before_they_are_checked(prompt: Any) -> None:
    """By their number, which the message has."""
    with pytest.raises(TextTooLongError, match="prompt has 101 token ids, more than the context of 100") as caught:
        ids_of(100, prompt)
    assert caught.value.param == "prompt"


def test_ids_that_fit_or_are_truncated_are_taken() -> None:
    """Of a truncated prompt, only those that stay count."""
    assert ids_of(100, [5] * 100) == [[5] * 100]
    assert ids_of(100, [[1], [2, 3]]) == [[1], [2, 3]]
    assert ids_of(100, [*range(300)], truncate_prompt_tokens=50) == [[*range(250, 300)]]
    with pytest.raises(TextTooLongError, match="prompt has 101 token ids"):
        ids_of(100, [*range(300)], truncate_prompt_tokens=101)


@pytest.mark.parametrize("wrong", [-1, 2**31])
def test_an_id_that_no_token_can_have_is_named(wrong: int) -> None:
    """It must fit in 31 bits; the largest that does is no error."""
    with pytest.raises(ParameterError, match=f"prompt has the token id {wrong}; ids are integers from 0 to 2147483647"):
        ids_of(100, [1, wrong, 2])
    assert ids_of(100, [0, 2**31 - 1]) == [[0, 2**31 - 1]]
