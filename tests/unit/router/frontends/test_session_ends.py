"""Answers in progress when an agent's session ends, and what is recorded of answers."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import SamplingConfig
from penstock.errors import SessionOverError, UnavailableError
from penstock.model.chat.chat_template import Renderer
from penstock.records import SessionCall, SessionId
from penstock.v1 import common_pb2, generate_pb2
from services.router.config import OpenAIConfig
from services.router.frontends.openai import generation
from services.router.frontends.openai.chat_api import ChatApi
from services.router.frontends.openai.parsing_threads import NUM_THREADS
from services.router.frontends.openai.schema.requests import ChatRequest
from services.router.frontends.openai.sessions import call as call_module
from services.router.frontends.openai.sessions import session_api
from services.router.frontends.openai.sessions.session_api import SessionApi
from services.router.tuning import OpenAITuning
from tests.support.router.agent_session import group_id, state_of
from tests.support.waiting import promptly

GROUP = group_id("run")
SESSION = SessionId.new(GROUP, 0)


class Engine:
    """Stands for the forwarder and its engines: answers once it is told to."""

    context_length = None

    def __init__(self) -> None:
        self.may_end, self.is_left = asyncio.Event(), asyncio.Event()
        self.begins_at_once = False
        self.has_begun = asyncio.Event()
        """Whether the router has the beginning of the answer."""
        self.before_chunk: Callable[[], None] = lambda: None

    async def forward(self, *_: object, **__: object) -> AsyncGenerator[bytes, None]:
        try:
            if self.begins_at_once:
                self.before_chunk()
                yield generate_pb2.GenerateChunk(
                    output_ids=[40, 41],
                    logprobs=[-0.25, -0.75],
                    version_spans=[common_pb2.VersionSpan(num_tokens=2, policy_version=3)],
                    usage=generate_pb2.Usage(num_prompt_tokens=9, num_output_tokens=2),
                ).SerializeToString()
                self.has_begun.set()
            await self.may_end.wait()
            self.before_chunk()
            yield generate_pb2.GenerateChunk(
                output_ids=[356],
                logprobs=[-0.5],
                version_spans=[common_pb2.VersionSpan(num_tokens=1, policy_version=3)],
                finish_reason=generate_pb2.FINISH_REASON_STOP,
                usage=generate_pb2.Usage(num_prompt_tokens=9, num_output_tokens=1),
                replica_id="engine-1",
            ).SerializeToString()
        finally:
            self.is_left.set()


class Sessions:
    """Stands for the sessions of a bus, one of which is looked at again and again after its time."""

    def __init__(self, engine: Engine, *, is_over: bool, timeout_s: float = 0.05) -> None:
        self.opened = SimpleNamespace(id=SESSION, state=state_of(GROUP, SESSION, timeout_s=timeout_s))
        self._engine = engine
        self._is_over = is_over
        self.num_finds = 0
        self.kept: list[SessionCall] = []
        self.is_gone_after: int | None = None

    async def find(self, _: SessionId) -> Any:
        self.num_finds += 1
        if self._engine.has_begun.is_set():
            state = state_of(GROUP, SESSION, timeout_s=0.05, is_ending=True)
            return SimpleNamespace(id=SESSION, state=state)
        if self.is_gone_after is not None and self.num_finds > self.is_gone_after:
            return None
        if self.num_finds == 3:
            raise UnavailableError("NATS is away")
        if self.num_finds == 5:
            if self._is_over:
                raise SessionOverError("this session is closed", is_superseded=False)
            self._engine.may_end.set()
        return self.opened

    async def read(self, _: SessionId, *, after: int) -> list[Any]:
        return []

    async def forget_refusal(self, _: SessionId) -> None:
        """None was noted."""

    async def keep(self, _: Any, call: SessionCall) -> int:
        self.kept.append(call)
        return len(self.kept)


@pytest.fixture
async def engine() -> Engine:
    """One that has not answered."""
    return Engine()


@pytest.fixture
async def chat(engine: Engine, renderer: Renderer) -> AsyncIterator[ChatApi]:
    """The policy at that engine. Only a session's own time bounds its answers, as with the default of 900 s."""
    recordings: Any = None
    forwarder: Any = engine
    api = ChatApi(
        OpenAITuning(timeout_s=0.0), SamplingConfig(), OpenAIConfig(), model="m", renderers=[renderer] * NUM_THREADS,
        forwarder=forwarder, recordings=recordings,
    )  # fmt: skip
    yield api
    api.close()


async def ask(chat: ChatApi, sessions: Sessions, *, is_streamed: bool) -> bytes:
    """Ask in the session, and read the answer."""
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    body = ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": is_streamed}
    )
    stored: Any = sessions
    images: Any = None
    response = await SessionApi(chat, stored, images, grid=None).answer(str(SESSION), body)
    await promptly(response({"type": "http", "path": "/"}, receive, send))
    return b"".join(bodies)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_api, "_LOOK_S", 0.001)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_does_not_outlive_its_session(engine: Engine, chat: ChatApi, *, is_streamed: bool) -> None:
    """When its time is over and it is closed, the engine stops; an agent that ignores its end would hold the slot."""
    with pytest.raises(SessionOverError, match="closed"):
        await ask(chat, Sessions(engine, is_over=True), is_streamed=is_streamed)
    assert engine.is_left.is_set()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_session_that_is_open_after_its_time_gets_its_answer(
    engine: Engine, chat: ChatApi, *, is_streamed: bool
) -> None:
    """As long as the verdicts that its agent asked for took, which its time does not count."""
    sessions = Sessions(engine, is_over=False)
    assert b'"stop"' in await ask(chat, sessions, is_streamed=is_streamed)
    assert (sessions.num_finds, len(sessions.kept)) == (5, 1)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_came_of_an_answer_is_recorded_when_its_session_is_ending(
    engine: Engine, chat: ChatApi, *, is_streamed: bool
) -> None:
    """Its sample has no other tokens, and this is seen only once its time is over. A call that begins then is
    refused."""
    engine.begins_at_once = True
    sessions = Sessions(engine, is_over=False)
    with contextlib.suppress(SessionOverError):  # in a stream, the last event
        assert b"the time of this session's sample is over" in await ask(chat, sessions, is_streamed=is_streamed)
    [call] = sessions.kept
    assert (call.output_ids.tolist(), call.logprobs.tolist()) == ([40, 41], [-0.25, -0.75])
    assert (call.finish_reason, call.num_prompt_tokens) == ("deadline", 9)
    assert engine.is_left.is_set()
    with pytest.raises(SessionOverError, match="the time of this session's sample is over"):
        await ask(chat, sessions, is_streamed=is_streamed)


async def test_a_session_that_ends_before_its_time_is_noticed(
    engine: Engine, chat: ChatApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was closed or superseded, or this router has known it for a part of its time only."""
    monkeypatch.setattr(session_api, "_EARLY_LOOK_S", 0.001)
    with pytest.raises(SessionOverError, match="closed"):
        await ask(chat, Sessions(engine, is_over=True, timeout_s=600.0), is_streamed=False)


async def test_a_session_whose_state_is_gone_ends(engine: Engine, chat: ChatApi) -> None:
    """Its answer could not be recorded."""
    sessions = Sessions(engine, is_over=False)
    sessions.is_gone_after = 2
    with pytest.raises(SessionOverError, match="gone from NATS"):
        await ask(chat, sessions, is_streamed=False)


async def test_nobody_looks_often_at_a_session_whose_time_is_not_over(engine: Engine, chat: ChatApi) -> None:
    """Every answer would cost NATS requests."""
    sessions = Sessions(engine, is_over=True, timeout_s=600.0)
    asyncio.get_running_loop().call_later(0.1, engine.may_end.set)
    await ask(chat, sessions, is_streamed=False)
    assert (sessions.num_finds, len(sessions.kept)) == (1, 1)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_is_recorded_with_where_and_when_it_was_generated(
    engine: Engine, chat: ChatApi, monkeypatch: pytest.MonkeyPatch, *, is_streamed: bool
) -> None:
    """It waits from when its call comes, for NATS too."""
    clock = SimpleNamespace(at=100.0, monotonic=lambda: clock.at, time=lambda: clock.at + 1e9)
    for module in (session_api, call_module, generation):
        monkeypatch.setattr(module, "time", clock)
    sessions = Sessions(engine, is_over=False, timeout_s=600.0)

    async def find(_: SessionId) -> Any:
        clock.at += 3.0
        return sessions.opened

    delays_s = iter((5.0, 2.0))

    def wait() -> None:
        clock.at += next(delays_s)

    monkeypatch.setattr(sessions, "find", find)
    engine.begins_at_once, engine.before_chunk = True, wait
    engine.may_end.set()
    await ask(chat, sessions, is_streamed=is_streamed)
    [call] = sessions.kept
    assert (call.replica_id, call.started_at) == ("engine-1", 1e9 + 100.0)
    assert (call.waited_s, call.generated_s) == (8.0, 2.0)
