"""What cannot be done is refused in OpenAI's form, by name, and never passed over."""

import asyncio
import base64
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from penstock.bus.connection import Bus
from penstock.config import BusConfig, RunConfig, SamplingConfig
from penstock.errors import ConfigError, InvalidRequestError, OverloadedError, PoisonError, PromptTooLongError
from penstock.model.chat.chat_template import Renderer
from penstock.runtime.ports import free_ports
from penstock.runtime.security import Security
from penstock.testing.answers import Saying
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.v1 import common_pb2
from services.router.config import OpenAIConfig, RouterConfig, RouterSettings
from services.router.frontends.openai import event_stream
from services.router.frontends.openai.errors import ParameterError, error_body
from services.router.frontends.openai.request_parser import RequestParser
from services.router.frontends.openai.schema.requests import ChatRequest, CompletionRequest
from services.router.frontends.openai.server import ChatBackend
from services.router.server import routing, serve
from services.router.tuning import OpenAITuning, Tuning
from tests.support.router.agent_session import agent_session
from tests.support.router.openai_harness import HI, MODEL_PATH, PNG, Harness, data_url, until_idle
from tests.support.waiting import HANG_S, until


def shown(url: str, role: str = "user", **fields: Any) -> dict[str, Any]:
    """A message with an image."""
    return {"messages": [{"role": role, "content": [{"type": "image_url", "image_url": {"url": url, **fields}}]}]}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "logit_bias": ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    "presence_penalty": ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
    "frequency_penalty": ({"frequency_penalty": 1}, "frequency_penalty", "not supported"),
    "unknown": ({"extra_body": {"odd": 1}}, "odd", "odd is unknown; leave it out"),
    "min_p": ({"extra_body": {"min_p": 0.1}}, "min_p", "not supported"),
    "unknown in a tool": (
        {"tools": [{"type": "function", "function": {"name": "f", "odd": 1}}]},
        "tools.0.function.odd",
        "unknown",
    ),
    "no messages": ({"messages": []}, "messages", "at least 1 item"),
    "role": ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'robot'"),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
    "content": ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "valid list"),
    "part": ({"messages": [{"role": "user", "content": [{"type": "odd"}]}]}, "messages.0.content.0", "'odd'"),
    "part's text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages.0.content.0.text",
        "valid string",
    ),
    "arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}]},
        "messages.0.tool_calls",
        "not a JSON object",
    ),
    "no number": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": NaN}'}}]}]},
        "messages.0.tool_calls",
        "not a JSON object",
    ),
    "temperature": ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    "top_p": ({"top_p": 0}, "top_p", "greater than 0"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    "two maxima": ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
    "n": ({"n": 17}, "n", "is over the 16 choices"),
    "stop": ({"stop": [""]}, "stop", "1 to 1000 characters"),
    "stops": ({"stop": ["x"] * 17}, "stop", "at most 16"),
    "session": ({"user": "x" * 257}, "user", "at most 256"),
    "record": ({"extra_body": {"record": True}}, "record", "needs a session"),
    "greedy record": ({"temperature": 0, "user": "u", "extra_body": {"record": True}}, "temperature", "greedy"),
    "web image": (
        shown("https://example.org/a.png"),
        "messages.0.content.0.image_url.url",
        "data: URLs only",
    ),
    "file image": (shown("file:///etc/passwd"), "messages.0.content.0.image_url.url", "data: URLs only"),
    "not base64": (shown("data:image/png;base64,???"), "messages.0.content.0.image_url.url", "not base64"),
    "percent image": (shown("data:image/png,abc"), "messages.0.content.0.image_url.url", "send data:image/png;base64"),
    "svg": (shown("data:image/svg+xml;base64,AA=="), "messages.0.content.0.image_url.url", "jpeg, webp or gif"),
    "empty image": (shown("data:image/png;base64,"), "messages.0.content.0.image_url.url", "no bytes"),
    "large image": (
        shown(data_url(bytes(20 * 2**20 + 3))),
        "messages.0.content.0.image_url.url",
        "is larger than 20971520 bytes",
    ),
    "system's image": (shown(data_url(PNG), "system"), "messages.0.content.0.image_url.url", "let the user show it"),
    "many images": (
        {"messages": shown(data_url(PNG))["messages"] * 33},
        "messages.32.content.0.image_url.url",
        "more than 32 images",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_supported_is_refused_by_name(harness: Harness, name: str) -> None:
    """400 with the parameter and what to do; no engine is asked."""
    options, param, message = REFUSED[name]
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        await harness.chat(**options)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == param
    assert harness.requests == []


COMPLETIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "best_of": ({"best_of": 3}, "best_of", "use n"),
    "suffix": ({"suffix": "x"}, "suffix", "not supported"),
    "empty": ({"prompt": ""}, "prompt", "empty"),
    "no prompts": ({"prompt": []}, "prompt", "empty"),
    "negative": ({"prompt": [1, -1]}, "prompt", "token id -1; ids are integers from 0"),
    "null": ({"prompt": [1, None]}, "prompt.1", "valid integer"),
    "too many": ({"prompt": ["x"] * 9, "n": 2}, "n", "over the 16 choices"),
}


@pytest.mark.parametrize("name", COMPLETIONS)
async def test_completions_refuse_by_name(harness: Harness, name: str) -> None:
    """The same for the other page."""
    options, param, message = COMPLETIONS[name]
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        await harness.client.completions.create(**{"model": harness.run, "prompt": "x", **options})
    assert caught.value.param == param
    assert harness.requests == []


class UnaskedRenderer(Renderer):
    """Renders nothing."""

    def render_prompt(self, *args: Any, **options: Any) -> list[int]:
        raise AssertionError

    def render_text(self, text: str) -> list[int]:
        raise AssertionError


def parser_of(renderer: Renderer, *, context_length: int | None = None, **settings: Any) -> RequestParser:
    """A parser that knows a context length, and that no token has more than 8 bytes."""
    return RequestParser(
        OpenAITuning(**settings),
        SamplingConfig(),
        renderer,
        longest_token_bytes=8,
        context_length=lambda: context_length,
    )


def test_text_that_cannot_fit_is_refused_before_it_is_rendered() -> None:
    """By its bytes: more than the context's tokens have, were each the longest one. Images do not count."""
    parser = parser_of(UnaskedRenderer.load(MODEL_PATH), context_length=100)
    long = [{"role": "user", "content": "é" * 200}, {"role": "user", "content": [{"type": "text", "text": "x" * 401}]}]
    chat = ChatRequest.model_validate({"model": "m", "messages": long})
    with pytest.raises(ParameterError, match="messages has 801 bytes of text, more than fit into the context of 100"):
        parser.parse_chat(chat, session_id="", is_recorded=False)
    with pytest.raises(ParameterError, match="prompt has 801 bytes of text"):
        parser.parse_completion(CompletionRequest(model="m", prompt="x" * 801), session_id="", is_recorded=False)
    with pytest.raises(AssertionError):  # which only the renderer raises
        parser.parse_completion(CompletionRequest(model="m", prompt="x" * 800), session_id="", is_recorded=False)


def test_too_many_choices_are_refused_before_their_prompts_are_rendered() -> None:
    """Which takes long where there are many."""
    parser = parser_of(UnaskedRenderer.load(MODEL_PATH), max_choices=8)
    many = CompletionRequest(model="m", prompt=["x"] * 3, n=3)
    with pytest.raises(ParameterError, match="n = 3 for 3 prompts is over"):
        parser.parse_completion(many, session_id="", is_recorded=False)
    chat = ChatRequest(model="m", messages=HI, n=9)
    with pytest.raises(ParameterError, match="n = 9 for 1 prompts is over"):
        parser.parse_chat(chat, session_id="", is_recorded=False)


async def test_another_model_is_not_found(harness: Harness) -> None:
    """404, and which there is."""
    with pytest.raises(openai.NotFoundError, match=f"send '{harness.run}'") as caught:
        await harness.client.chat.completions.create(model="gpt-9", messages=HI)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match="is not served here") as caught:
        await harness.client.models.retrieve("gpt-9")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_what_is_no_json_is_said_to_be_none(harness: Harness) -> None:
    """400, in OpenAI's form; so are keys that come twice."""
    async with harness.http() as client:
        for body, message in ((b"{", "not JSON"), (b'{"model": "a", "model": "b"}', "twice")):
            answer = await client.post("/v1/chat/completions", content=body)
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert (await client.get("/v1/nothing")).json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_the_engine_refuses_is_the_clients_to_mend(harness: Harness, is_streamed: bool) -> None:
    """400 with the engine's words, before a stream begins."""
    for engine in harness.engines:
        engine.error = InvalidRequestError("images[0] (5 bytes) cannot be decoded")
    with pytest.raises(openai.BadRequestError, match="cannot be decoded") as caught:
        await harness.chat(stream=is_streamed)
    for inner in ("127.0.0.1", "replica"):  # the engine's name and address are nobody's business outside
        assert inner not in str(caught.value)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_without_a_replica_it_is_unavailable(harness: Harness, is_streamed: bool) -> None:
    """503 with Retry-After, after router.wait_for_replica_s."""
    for engine in harness.engines:
        await engine.update(state=common_pb2.REPLICA_STATE_DRAINING)
    await harness.until_routable(0)
    with pytest.raises(openai.InternalServerError) as caught:
        await harness.chat(stream=is_streamed)
    assert caught.value.status_code == 503
    assert caught.value.code == "unavailable"
    assert caught.value.response.headers["retry-after"] == "1"


async def test_a_request_that_breaks_engines_is_not_retried(harness: Harness) -> None:
    """400, because OpenAI's client repeats what fails with 5xx; a prompt that is too long has OpenAI's code."""
    for engine in harness.engines:
        engine.error = PoisonError("given up after 3 replicas failed")
    with pytest.raises(openai.BadRequestError, match="given up after 3 replicas failed"):
        await harness.chat()
    for engine in harness.engines:
        engine.error = PromptTooLongError("9 tokens where 8 fit")
    with pytest.raises(openai.BadRequestError) as caught:
        await harness.chat()
    assert caught.value.code == "context_length_exceeded"


async def test_engines_that_are_full_are_an_overload(harness: Harness) -> None:
    """429 with Retry-After."""
    for engine in harness.engines:
        engine.error = OverloadedError("full")
    with pytest.raises(openai.RateLimitError) as caught:
        await harness.chat()
    assert (caught.value.type, caught.value.code) == ("rate_limit_error", "overloaded")
    assert caught.value.response.headers["retry-after"] == "1"


async def test_what_takes_too_long_is_given_up(bus: Bus) -> None:
    """504 after its deadline, and the request is aborted in the engine."""
    port = free_ports(1)[0]
    config = RouterConfig(http_port=port, openai=OpenAIConfig(model="slow"))
    tuning = Tuning(openai=OpenAITuning(timeout_s=5.0))
    backend = ChatBackend(model="slow", renderer=Renderer.load(MODEL_PATH), sampling=SamplingConfig())
    async with (
        SimulatedEngine(bus, delay_s=60.0).running() as engine,
        routing(config, bus, grace_s=0.0, backend=backend, tuning=tuning),
    ):
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(model="slow", messages=HI)
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
        assert engine.num_calls == 1


@pytest.mark.slow
@pytest.mark.parametrize("reads_on", [True, False])
async def test_a_client_that_does_not_read_holds_no_replica(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, reads_on: bool
) -> None:
    """After its deadline its slots are free. If it soon reads on it gets the error, else it is cut off."""
    monkeypatch.setattr(event_stream, "_REPORT_S", 60.0 if reads_on else 0.0)
    port, loop = free_ports(1)[0], asyncio.get_running_loop()
    config = RouterConfig(http_port=port, openai=OpenAIConfig(model="slow"))
    tuning = Tuning(openai=OpenAITuning(timeout_s=20.0))
    backend = ChatBackend(model="slow", renderer=Renderer.load(MODEL_PATH), sampling=SamplingConfig())
    # The prompt's ids come back with each choice: together more than sockets hold for somebody who does not read.
    fields = {"model": "slow", "prompt": [2**31 - 1] * 100_000, "n": 8, "stream": True, "return_token_ids": True}
    body = json.dumps({**fields, "max_tokens": 300}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(SimulatedEngine(bus, answer=Saying([5] * 1000)).running())
        server = await stack.enter_async_context(routing(config, bus, grace_s=0.0, backend=backend, tuning=tuning))
        client = stack.enter_context(socket.socket())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, head.encode() + body)
        await until(lambda: engine.num_calls == 8)
        await until_idle(server.address)
        async with asyncio.timeout(HANG_S):
            received = b"".join([data async for data in _received(client)])
    assert received.startswith(b"HTTP/1.1 200")
    assert (b'"code": "deadline_exceeded"' in received) == reads_on
    assert b"[DONE]" not in received


async def _received(client: socket.socket) -> AsyncIterator[bytes]:
    while data := await asyncio.get_running_loop().sock_recv(client, 2**20):
        yield data


async def test_the_frontend_needs_a_model() -> None:
    """Said before anything starts."""
    with pytest.raises(ConfigError, match=r"router.http_port = 0 needs the model's tokenizer; give --model.path"):
        await serve(
            RouterSettings(router=RouterConfig(http_port=0), run=RunConfig(), bus=BusConfig()),
            asyncio.Event(),
            security=Security(),
        )


async def test_what_fails_in_mid_stream_is_told_in_the_stream(harness: Harness) -> None:
    """An event with the error, which OpenAI's client raises; there is no end that looks like one."""
    harness.says("one two three")
    for engine in harness.engines:
        engine.fail_after, engine.fail_with = 3, InvalidRequestError("went wrong")
    with pytest.raises(openai.APIError, match="went wrong"):
        async for _ in await harness.chat(stream=True):
            pass
    body = {"model": harness.run, "messages": HI, "stream": True}
    async with harness.http() as client:
        text = (await client.post("/v1/chat/completions", json=body)).text
    assert 'finish_reason": "stop' not in text
    assert "[DONE]" not in text


async def test_one_choice_that_fails_fails_the_answer(harness: Harness) -> None:
    """And the others are aborted."""
    harness.says("word " * 300)
    for engine in harness.engines:
        engine.token_s = 0.02
    harness.engines[0].fail_after, harness.engines[0].fail_with = 3, InvalidRequestError("went wrong")
    with pytest.raises(openai.BadRequestError, match="went wrong"):
        await harness.chat(n=4, max_tokens=1000)
    await until(lambda: sum(engine.num_running for engine in harness.engines) == 0)


async def test_a_body_that_is_too_large_is_refused(harness: Harness) -> None:
    """413, above 64 MiB. An agent's session has the reason, since the same call would be refused again."""
    text = base64.b64encode(bytes(48 * 2**20)).decode()
    body = {"model": harness.run, "messages": [{"role": "user", "content": text}]}
    async with agent_session(harness) as agent, harness.http() as client:
        for session in ("", f"/sessions/{agent.opened.id}"):
            answer = await client.post(f"{session}/v1/chat/completions", json=body)
            assert answer.status_code == 413
        failure = await agent.sessions.read_failure(agent.opened.id)
        assert failure is not None
        assert not failure.is_poison
        assert failure.reason == answer.json()["error"]["message"]


def test_what_is_refused_before_it_is_read_has_openais_form_too() -> None:
    """401 and 413, which the server answers by itself."""
    assert error_body(401, "token missing")["error"] == {
        "message": "token missing",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }
    assert error_body(413, "too large")["error"]["type"] == "invalid_request_error"
