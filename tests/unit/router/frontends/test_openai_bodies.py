"""Calls that wait for engines hold no body: neither its room among all bodies, nor its bytes and what JSON made of
them."""

import asyncio
import gc
import json
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.http.boundary import Boundary
from penstock.runtime.security import Security
from penstock.v1 import generate_pb2
from services.router.frontends.openai import chat_api
from services.router.frontends.openai.app import make_openai_app
from services.router.frontends.openai.chat_api import ChatApi
from services.router.frontends.openai.errors import error_body
from services.router.frontends.openai.generation import Terms, generating
from services.router.frontends.openai.parsed_request import PromptIds, pack_ids
from services.router.resumable_stream import ResumableStream
from services.router.tuning import OpenAITuning
from tests.support.waiting import promptly, until

_LARGE = "x" * 2**17
_NUM_CALLS = 4
"""All bodies together have room for two of these calls."""


class Generation:
    """Stands for `generating`: all calls wait until they may end."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.may_end = asyncio.Event()

    @asynccontextmanager
    async def __call__(self, *_: object, **__: object) -> AsyncIterator[AsyncIterator[Any]]:
        async def deltas() -> AsyncIterator[Any]:
            self.num_waiting += 1
            await self.may_end.wait()
            yield 0, SimpleNamespace(is_last=True)

        yield deltas()


class Parser:
    """Stands for a parser, which keeps nothing of a request."""

    def __init__(self) -> None:
        self.bodies: list[weakref.ref[Any]] = []

    async def run(self, parse: Any, *, size_bytes: int) -> Any:
        assert size_bytes >= len(_LARGE)
        return parse(self)

    def parse_chat(self, body: Any, **_: object) -> Any:
        self.bodies.append(weakref.ref(body))
        return SimpleNamespace(
            num_all=0, is_cut_by_text=False, is_recorded=False, shows_usage=False, opens_with_prompt=False
        )


def form(*_: object, **__: object) -> Any:
    """A format of answers without anything in them."""
    nothing: dict[str, Any] = {}
    return SimpleNamespace(
        take=lambda _: None,
        whole=lambda: nothing,
        opening=lambda _: None,
        delta=lambda *_: None,
        closing=lambda *_, **__: nothing,
        headers=nothing,
    )


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_more_calls_wait_than_their_bodies_would_fit_at_once(
    monkeypatch: pytest.MonkeyPatch, *, is_streamed: bool
) -> None:
    """A body counts until its request is parsed; the wait queue counts what the call is then."""
    generation, parser = Generation(), Parser()
    monkeypatch.setattr(chat_api, "generating", generation)
    monkeypatch.setattr(chat_api, "ChatFormat", form)
    api, none = ChatApi.__new__(ChatApi), SimpleNamespace()
    stand_in: Any = none
    api.model, api._texts, api._forwarder, api._recordings = "m", stand_in, stand_in, stand_in
    parsing: Any = parser
    api._parsing, api._tuning = parsing, OpenAITuning()
    chat = {"model": "m", "stream": is_streamed, "messages": [{"role": "user", "content": _LARGE}]}
    body = json.dumps(chat).encode()
    app = make_openai_app(api, stand_in)
    boundary = Boundary(app, max_body_bytes=len(body) * 3 // 2, make_error_body=error_body, security=Security())
    num_references = sys.getrefcount(body)
    calls = [asyncio.create_task(status_of(boundary, body)) for _ in range(_NUM_CALLS)]
    await until(lambda: generation.num_waiting == _NUM_CALLS or any(each.done() for each in calls))
    assert [each.result() for each in calls if each.done()] == []
    gc.collect()
    assert boundary._bodies.num_bytes == 0
    assert sys.getrefcount(body) == num_references
    assert [each() for each in parser.bodies] == [None] * _NUM_CALLS
    generation.may_end.set()
    assert await promptly(asyncio.gather(*calls)) == [200] * _NUM_CALLS


async def status_of(boundary: Boundary, body: bytes) -> int:
    """The status of the answer to a chat with this body, without a reference to it once it is read."""
    messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]
    del body
    sent: list[Any] = []

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await boundary(scope, receive, send)
    return int(sent[0]["status"])


async def test_a_waiting_call_counts_what_its_choices_share_once() -> None:
    """A prompt's bytes with its first choice. The first of all counts what the caller keeps: ids and images of the
    request, to record them, and the images of a session, to restore them."""
    counted: list[int] = []
    whole: list[int] = []

    def forward(stream: ResumableStream, *, size_bytes: int, **_: object) -> Any:
        counted.append(size_bytes)
        whole.append(stream.size_bytes)

        async def chunks() -> AsyncIterator[bytes]:
            for each in ():
                yield each

        return chunks()

    prompts = [PromptIds(input_ids=pack_ids([1, 2]), images=[b"image", image]) for image in (b"other", b"third")]
    request: Any = SimpleNamespace(
        request_id="r",
        session_id="",
        group_id="",
        num_choices=2,
        prompts=prompts,
        prompt_of=lambda choice: prompts[choice // 2],
        sampling=generate_pb2.SamplingParams(),
        num_top_logprobs=0,
        num_prompt_logprobs=None,
        scores_prompt=False,
        min_policy_version=0,
        exact_policy_version=0,
    )
    choices: Any = [None] * 4
    forwarder: Any = SimpleNamespace(forward=forward)
    terms = Terms(restorable_bytes=100)
    async with generating(forwarder, request, choices, terms, timeout_s=60.0, chunk_tokens=0, is_streamed=False):
        await until(lambda: len(counted) == len(choices))
    num_id_bytes = len(generate_pb2.GenerateRequest(request_id="r/1").SerializeToString())
    assert counted == [whole[0] + 2 * 18 + 100, num_id_bytes, whole[2], num_id_bytes]
    assert min(whole) > 18
