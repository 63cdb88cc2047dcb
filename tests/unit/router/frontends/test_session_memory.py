"""What calls of sessions that wait for an engine take in memory is what they count for."""

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.config import SamplingConfig
from penstock.model.chat.chat_template import Renderer
from penstock.records import Message, SessionCall, SessionId, TextPart, VersionSpan
from services.router.config import OpenAIConfig
from services.router.frontends.openai.chat_api import ChatApi
from services.router.frontends.openai.parsing_threads import NUM_THREADS
from services.router.frontends.openai.schema.requests import ChatRequest
from services.router.frontends.openai.sessions.digests import digest_next, digest_start
from services.router.frontends.openai.sessions.session_api import SessionApi
from services.router.tuning import OpenAITuning
from tests.support.router.agent_session import group_id, state_of
from tests.support.waiting import promptly, until

GROUP = group_id("run")
SESSION = SessionId.new(GROUP, 0)
NUM_TOKENS, NUM_CALLS = 50_000, 4
CHAT = ChatRequest.model_validate(
    {
        "model": "m",
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "go on"},
        ],
    }
)


class Queue:
    """Stands for the forwarder: all calls wait."""

    context_length = None

    def __init__(self) -> None:
        self.sizes: list[int] = []
        """What each of them counts for, in bytes."""

    async def forward(self, _: object, *, size_bytes: int, **__: object) -> AsyncIterator[bytes]:
        self.sizes.append(size_bytes)
        await asyncio.Event().wait()
        yield b""


class Sessions:
    """Stands for a bus that has one long answer of the session."""

    async def find(self, _: SessionId) -> Any:
        return SimpleNamespace(id=SESSION, state=state_of(GROUP, SESSION))

    async def read(self, _: SessionId, *, after: int) -> list[tuple[int, SessionCall]]:
        said = Message(role="assistant", parts=(TextPart(text="yes"),))
        asked = digest_next(digest_start((), {}), Message(role="user", parts=(TextPart(text="hi"),)))
        call = SessionCall(
            request_id="q",
            choice=0,
            conversation=digest_next(asked, said),
            answer=digest_next("", said),
            input_ids=np.random.default_rng(0).integers(1000, 151_000, NUM_TOKENS).astype("<i4"),
            output_ids=np.array([356], "<i4"),
            logprobs=np.zeros(1, "<f4"),
            version_spans=(VersionSpan(num_tokens=1, policy_version=3),),
            finish_reason="stop",
            num_prompt_tokens=NUM_TOKENS,
            num_cached_tokens=0,
        )
        return [] if after else [(1, call)]


@pytest.fixture
def queue() -> Queue:
    """One without calls."""
    return Queue()


async def test_a_waiting_call_counts_what_it_takes(queue: Queue, renderer: Renderer) -> None:
    """Its ids are kept once as int32 beside the serialised request; as lists of ints they were 18 times that."""
    forwarder: Any = queue
    recordings: Any = None
    chat = ChatApi(
        OpenAITuning(), SamplingConfig(), OpenAIConfig(), model="m", renderers=[renderer] * NUM_THREADS,
        forwarder=forwarder, recordings=recordings,
    )  # fmt: skip
    make: Any = SessionApi
    sessions = make(chat, Sessions(), None, grid=None)
    calls: list[asyncio.Task[None]] = []

    async def wait_in_queue() -> None:
        response = await sessions.answer(str(SESSION), CHAT)
        calls.append(asyncio.ensure_future(response({"type": "http", "path": "/"}, None, None)))
        await until(lambda: len(queue.sizes) == len(calls))

    await promptly(wait_in_queue())  # the history is read
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(NUM_CALLS):
            await promptly(wait_in_queue())
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        chat.close()
    counted = sum(queue.sizes[1:])
    assert counted > 7 * NUM_TOKENS * NUM_CALLS * 0.9
    assert counted / 2 < taken < 1.5 * counted
