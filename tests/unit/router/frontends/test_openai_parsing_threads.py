"""Prompts are parsed and answers written off the event loop: short prompts never wait for long ones, nor for clients
that have left."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import UnavailableError
from penstock.records import SessionId
from services.router.frontends.openai import chat_api, event_stream
from services.router.frontends.openai.chat_api import ChatApi
from services.router.frontends.openai.parsing.text_sizes import LONG_BYTES
from services.router.frontends.openai.parsing_threads import NUM_THREADS, ParsingThreads
from services.router.frontends.openai.schema.requests import ChatRequest
from services.router.frontends.openai.schema.tokens import DetokenizeRequest
from services.router.frontends.openai.sessions.session_api import SessionApi
from tests.support.router.agent_session import group_id, state_of
from tests.support.waiting import HANG_S


class Parser:
    """Stands for a parser; counts who uses it at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


async def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    """However many long ones there are, and though none of them ends before it."""
    parsers: list[Any] = [Parser() for _ in range(NUM_THREADS)]
    threads, may_end = ParsingThreads(parsers), threading.Event()
    long = [
        asyncio.ensure_future(threads.run(lambda _: may_end.wait(HANG_S), size_bytes=LONG_BYTES))
        for _ in range(2 * NUM_THREADS)
    ]
    await asyncio.sleep(0)  # they are handed to the threads
    assert await threads.run(lambda _: "short", size_bytes=LONG_BYTES - 1) == "short"
    assert not any(each.done() for each in long)
    may_end.set()
    assert all(await asyncio.gather(*long))
    threads.close()


async def test_tools_of_a_sessions_row_make_a_prompt_long() -> None:
    """They are rendered and tokenised with it, though the request does not have them."""
    tool = {"type": "function", "function": {"name": "add", "description": "a" * LONG_BYTES}}
    group = group_id("run")
    session = SessionId.new(group, 0)
    opened = SimpleNamespace(id=session, state=state_of(group, session, tools=(tool,)))
    sizes: list[int] = []

    async def find(_: SessionId) -> Any:
        return opened

    async def read(_: SessionId, *, after: int) -> list[Any]:
        return []

    async def parse(_: Any, *, size_bytes: int) -> Any:
        sizes.append(size_bytes)
        raise UnavailableError("that is all")

    api: Any = SessionApi
    sessions = api(SimpleNamespace(parse=parse), SimpleNamespace(find=find, read=read), None, grid=None)
    chat = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(UnavailableError, match="that is all"):
        await sessions.answer(str(session), chat)
    assert min(sizes) > LONG_BYTES


async def test_a_prompt_whose_client_left_before_its_turn_is_not_parsed() -> None:
    """The threads go on with those who wait."""
    threads, may_end, calls = ParsingThreads([Parser() for _ in range(NUM_THREADS)]), threading.Event(), []  # type: ignore[misc]
    running = [
        asyncio.ensure_future(threads.run(lambda _: may_end.wait(HANG_S), size_bytes=LONG_BYTES))
        for _ in range(NUM_THREADS - 1)
    ]
    await asyncio.sleep(0)
    left = asyncio.ensure_future(threads.run(lambda _: calls.append("left"), size_bytes=LONG_BYTES))
    stays = asyncio.ensure_future(threads.run(lambda _: calls.append("stays"), size_bytes=LONG_BYTES))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    may_end.set()
    await asyncio.gather(*running, stays)
    assert calls == ["stays"]
    threads.close()


async def test_no_parser_is_used_by_two_threads_at_once() -> None:
    """A tokenizer has state."""
    parsers: list[Any] = [Parser() for _ in range(NUM_THREADS)]
    threads = ParsingThreads(parsers)

    def parse(parser: Any) -> bool:
        if not parser.lock.acquire(blocking=False):
            return False
        parser.lock.release()
        return True

    sizes = [LONG_BYTES * (number % 2) for number in range(200)]
    assert all(await asyncio.gather(*(threads.run(parse, size_bytes=size) for size in sizes)))
    threads.close()


async def answered(monkeypatch: pytest.MonkeyPatch, form: Any, *, is_streamed: bool, **request: bool) -> Any:
    """The headers of an answer of one token in this format, and its body as JSON; of a stream, its first event."""

    @asynccontextmanager
    async def generated(*_: object, **__: object) -> AsyncIterator[AsyncIterator[Any]]:
        async def deltas() -> AsyncIterator[Any]:
            yield 0, SimpleNamespace(is_last=True)

        yield deltas()

    async def keep(_: object) -> None:
        """Record nothing."""

    async def send(message: Any) -> None:
        head.update(message.get("headers", ()))
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        """The client does not leave."""
        await asyncio.Event().wait()

    monkeypatch.setattr(chat_api, "generating", generated)
    api, head, sent = api_of("m"), dict[bytes, bytes](), list[bytes]()
    asked: Any = SimpleNamespace(num_all=0, is_cut_by_text=False, shows_usage=False, **request)
    answer = await api.answer(asked, lambda *_, **__: form, is_streamed=is_streamed, keep=keep)  # type: ignore[arg-type]
    await answer({"type": "http", "path": "/"}, receive, send)
    return head, json.loads(b"".join(sent).removeprefix(b"data: ").split(b"\n\n")[0])


def api_of(model: str) -> ChatApi:
    """An API without anything that could parse or forward."""
    api = ChatApi.__new__(ChatApi)
    api.model, api._texts, api._forwarder = model, *[None] * 2  # type: ignore[assignment]
    api._tuning = SimpleNamespace(timeout_s=1.0)  # type: ignore[assignment]
    return api


async def test_answers_are_written_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with many log-probabilities takes seconds, in which every other call would stand still; so does the text of
    many ids."""
    form = SimpleNamespace(take=lambda _: None, whole=lambda: {"thread": threading.get_ident()}, headers={"x-y": "1"})
    monkeypatch.setattr(ChatApi, "_text_of", lambda _, ids: str(threading.get_ident()))
    head, answer = await answered(monkeypatch, form, is_streamed=False)
    assert (head[b"content-type"], head[b"x-y"]) == (b"application/json", b"1")
    text = (await api_of("m").detokenize(DetokenizeRequest(tokens=[1])))["text"]
    for thread in (answer["thread"], int(text)):
        assert thread != threading.get_ident()


@pytest.mark.parametrize("opens_with_prompt", [True, False])
async def test_the_prompt_before_a_stream_is_written_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, *, opens_with_prompt: bool
) -> None:
    """Its log-probabilities take as long as those of a whole answer. Other streams begin without a thread."""
    encoders = []

    def encode(event: Any) -> bytes:
        encoders.append(threading.get_ident())
        return event_stream.encode_event(event)

    form = SimpleNamespace(
        take=lambda _: None,
        opening=lambda _: {"thread": threading.get_ident()},
        delta=lambda *_: None,
        closing=lambda *_, **__: {},
        headers={},
    )
    monkeypatch.setattr(chat_api, "encode_event", encode)
    _, first = await answered(monkeypatch, form, is_streamed=True, opens_with_prompt=opens_with_prompt)
    assert first["thread"] == encoders[0]
    assert (encoders[0] != threading.get_ident()) is opens_with_prompt
