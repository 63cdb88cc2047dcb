"""Models of requests to the OpenAI-compatible frontend."""

import inspect
from typing import Any

import pydantic
import pytest
from openai.resources import chat, completions

from services.router.frontends.openai.schema.base import HINTS, REFUSED
from services.router.frontends.openai.schema.requests import ChatRequest, CompletionRequest
from services.router.frontends.openai.schema.tokens import DetokenizeRequest, TokenizeRequest

NUM_ITEMS = 2000
HI = {"role": "user", "content": "hi"}
IDS, NONE = [1] * NUM_ITEMS, [None] * NUM_ITEMS
"""A null is no item anywhere."""


@pytest.mark.parametrize(
    ("model", "fields", "place"),
    [
        (CompletionRequest, {"prompt": [*IDS, None]}, ("prompt", "ids", NUM_ITEMS)),
        (CompletionRequest, {"prompt": NONE}, ("prompt", "ids", 0)),
        (CompletionRequest, {"prompt": ["a", *NONE]}, ("prompt", "texts", 1)),
        (CompletionRequest, {"prompt": [[1], NONE, *NONE]}, ("prompt", "several", 1, 0)),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": NONE}, ("stop_token_ids", 0)),
        (ChatRequest, {"messages": NONE}, ("messages", 0)),
        (ChatRequest, {"messages": [{**HI, "content": NONE}]}, ("messages", 0, "content", "parts", 0)),
        (ChatRequest, {"messages": [{**HI, "tool_calls": NONE}]}, ("messages", 0, "tool_calls", 0)),
        (ChatRequest, {"messages": [HI], "tools": NONE}, ("tools", 0)),
        (ChatRequest, {"messages": [HI], "guided_choice": NONE}, ("structured_outputs", "choice", 0)),
        (TokenizeRequest, {"messages": NONE}, ("messages", 0)),
        (TokenizeRequest, {"messages": [HI], "tools": NONE}, ("tools", 0)),
        (DetokenizeRequest, {"tokens": NONE}, ("tokens", 0)),
    ],
)
def test_a_list_is_refused_at_its_first_wrong_item(model: Any, fields: Any, place: tuple[str | int, ...]) -> None:
    """With one error, which blames that item: errors for all that a body may hold would stop the router for minutes."""
    with pytest.raises(pydantic.ValidationError) as caught:
        model.model_validate({"model": "m", **fields})
    assert [error["loc"] for error in caught.value.errors()] == [place]


def test_stops_are_refused_at_the_first_wrong_one() -> None:
    """As no text, and as no list of texts."""
    with pytest.raises(pydantic.ValidationError) as caught:
        ChatRequest.model_validate({"model": "m", "messages": [HI], "stop": NONE})
    assert caught.value.error_count() == 2


@pytest.mark.parametrize("prompt", ["a", "", ["a", "b"], [], [1, 2], [[1], [2, 3]], [[]]])
def test_a_prompt_may_be_texts_or_ids(prompt: Any) -> None:
    """One, or several of a kind."""
    assert CompletionRequest(model="m", prompt=prompt).prompt == prompt


@pytest.mark.parametrize("prompt", [5, {"a": 1}, ["a", 1], [1, "b"], [1, [1]], [[1], 1], [[1], "a"]])
def test_a_prompt_is_nothing_else(prompt: Any) -> None:
    """Nor several kinds at once."""
    with pytest.raises(pydantic.ValidationError) as caught:
        CompletionRequest(model="m", prompt=prompt)
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    ("create", "model"),
    [(chat.Completions.create, ChatRequest), (completions.Completions.create, CompletionRequest)],
)
def test_every_parameter_of_openais_client_is_known(create: Any, model: type[pydantic.BaseModel]) -> None:
    """Taken, without effect, or refused with a reason; what is unknown is refused as an extra input."""
    of_the_client = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    sent = inspect.signature(create).parameters.keys() - of_the_client
    assert len(sent) > 10
    assert sent - model.model_fields.keys() - set(HINTS) - REFUSED.keys() == set()


def test_a_hint_may_have_any_value() -> None:
    """No answer depends on it."""
    body: dict[str, Any] = {"model": "m", "messages": [HI], **dict.fromkeys(HINTS, "24h")}
    assert ChatRequest.model_validate(body) == ChatRequest.model_validate({"model": "m", "messages": [HI]})
