"""The trace says how long a call waited for a replica, and what became of each attempt."""

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import OverloadedError
from penstock.telemetry import spans
from services.router import forwarder

_ABOUT = {"group": "run/3/0/e", "request": "run/3/0/e/1/0/abc", "attempt": 1}


@pytest.fixture(autouse=True)
def buffer() -> Iterator[spans.SpanBuffer]:
    """The spans of this process, for this test."""
    yield spans.open_buffer("router")
    spans.close_buffer()


def _slots(*, waits_s: float = 0.0, error: Exception | None = None) -> forwarder._Slots:
    """The slots of a call that gets one, or an error, after a wait."""

    async def take(_: object) -> SimpleNamespace:
        await asyncio.sleep(waits_s)
        if error is not None:
            raise error
        return SimpleNamespace(replica_id="rollout-0", span=None)

    pool: Any = SimpleNamespace(take=take)
    query = SimpleNamespace(num_tokens=5, group_id=_ABOUT["group"], request_id=_ABOUT["request"])
    ticket: Any = SimpleNamespace(query=query)
    nothing: Any = None
    return forwarder._Slots(pool, ticket, nothing, nothing)


def _kept(buffer: spans.SpanBuffer) -> list[tuple[str, dict[str, Any]]]:
    return [(name, about) for name, _, _, about in json.loads(buffer.take_batch(10)[0])["spans"]]


async def test_a_wait_has_a_span_and_so_has_the_attempt_after_it(buffer: spans.SpanBuffer) -> None:
    """Both say which call it is, and which replica took it."""
    slot = await _slots(waits_s=0.002).take(1)
    assert slot.span is not None
    slot.span.begin_answer()
    slot.span.settle(None)
    slot.span.end()
    (queued, waited), (attempt, about) = _kept(buffer)
    assert (queued, waited) == ("route.queued", _ABOUT | {"replica": "rollout-0"})
    assert about.pop("first_token_s") >= 0
    assert (attempt, about) == ("route.attempt", waited | {"outcome": "complete"})


async def test_a_call_that_got_no_replica_says_why(buffer: spans.SpanBuffer) -> None:
    """However short it waited."""
    with pytest.raises(OverloadedError):
        await _slots(error=OverloadedError("the queue is full")).take(1)
    assert _kept(buffer) == [("route.queued", _ABOUT | {"error": "the queue is full"})]
