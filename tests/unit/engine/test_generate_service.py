"""The engine's service for turns, without SGLang."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.v1 import common_pb2, generate_pb2
from services.rollout.engine import generate_service
from services.rollout.engine.crash_streak import CrashStreak
from services.rollout.engine.generate_service import GenerateServicer
from services.rollout.engine.sglang.generation import Generation


class SlowEngine:
    """Stands for SGLang, which takes its time for each of two parts."""

    mixture = None
    checker = SimpleNamespace(check=lambda request, _: request)

    async def generate(self, _: Any) -> Generation:
        """A whole turn."""
        await asyncio.sleep(0.01)
        return part(2, stopped=True)

    async def stream(self, _: Any, *, chunk_tokens: int) -> AsyncIterator[Generation]:
        """A turn in two parts."""
        for number in (1, 2):
            await asyncio.sleep(0.01)
            yield part(number, stopped=True if number == 2 else None)


def part(number: int, *, stopped: bool | None) -> Generation:
    """One token of version 1, the turn's `number`-th."""
    return Generation(
        output_ids=[number],
        logprobs=[-0.5],
        version_spans=[(1, 1)],
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_tokens_so_far=number,
        stopped=stopped,
    )


def servicer() -> Any:
    """The service of an engine that serves version 1."""
    make: Any = GenerateServicer
    view = SimpleNamespace(state=common_pb2.REPLICA_STATE_READY, replica_id="r")
    return make(
        SimpleNamespace(max_running=1), SlowEngine(), SimpleNamespace(version=1), view, None,
        CrashStreak(max_in_a_row=3, min_s=1.0),
    )  # fmt: skip


async def turn_of(remaining_s: float | None) -> list[list[int]]:
    """The ids of a turn as a whole, and of its chunks, for a caller with this deadline."""
    context, request = SimpleNamespace(time_remaining=lambda: remaining_s), generate_pb2.GenerateRequest(input_ids=[5])
    whole = await servicer().Generate(request, context)
    chunks = [chunk async for chunk in servicer().GenerateStream(request, context)]
    assert chunks[-1].finish_reason == generate_pb2.FINISH_REASON_STOP
    return [list(whole.output_ids), *(list(chunk.output_ids) for chunk in chunks)]


async def test_a_turn_may_take_as_long_as_its_caller_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own limit, here none at all, is for callers that set no deadline."""
    monkeypatch.setattr(generate_service, "_REQUEST_DEADLINE_S", 0.0)
    assert await turn_of(60.0) == [[2], [1], [2]]
    with pytest.raises(TimeoutError):
        await turn_of(None)


async def test_a_callers_deadline_ends_its_turn() -> None:
    """Whatever the engine's own limit."""
    with pytest.raises(TimeoutError):
        await turn_of(0.0)
