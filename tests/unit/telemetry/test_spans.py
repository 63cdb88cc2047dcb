"""Spans in memory: bounded, and nothing where no process keeps them."""

import contextlib
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.telemetry import spans


@pytest.fixture
def buffer() -> Iterator[spans.SpanBuffer]:
    """A buffer of three spans, for this test."""
    yield spans.open_buffer("worker-0", max_waiting=3)
    spans.close_buffer()


def test_a_span_has_wall_clock_times_and_its_attributes(buffer: spans.SpanBuffer) -> None:
    """Times are seconds since 1970; attributes without a value are left out, long texts cut."""
    began_at, began = time.time() - 2.0, time.monotonic() - 2.0
    spans.record("turn", began, began + 1.5, group="run/3/0/abc", sample=1, error=None, request="x" * 5000)
    payload, num_spans = buffer.take_batch(10)
    took_s = time.monotonic() - 2.0 - began
    batch = json.loads(payload)
    ((name, start, seconds, attributes),) = batch["spans"]
    assert (name, seconds, num_spans) == ("turn", 1.5, 1)
    assert start == pytest.approx(began_at, abs=took_s + 0.01)
    assert attributes == {"group": "run/3/0/abc", "sample": 1, "request": "x" * 300}
    assert (batch["process"], batch["number"], batch["dropped"]) == ("worker-0", 1, 0)
    assert b"\n" not in payload


def test_one_unusual_span_changes_no_other(buffer: spans.SpanBuffer) -> None:
    """A batch is looked at value by value only if it may need it; what it says is the same."""
    attributes = {"group": "run/3/0/abc", "wait_s": 0.123456789, "endings": {"stop": 4}, "is_new": True}
    spans.record("turn", 1.0, 2.5, **attributes)
    usual = json.loads(buffer.take_batch(1)[0])["spans"][0]
    unusual: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"turn": None}, {}),
        ({"request": "no \ud83d"}, {"request": "no \ufffd"}),
        ({"request": "x" * 5000}, {"request": "x" * 300}),
    )
    for given, expected in unusual:
        spans.record("turn", 1.0, 2.5, **attributes)
        spans.record("turn", 1.0, **given)
        same, found = json.loads(buffer.take_batch(2)[0])["spans"]
        assert (same[0], same[3]) == (usual[0], usual[3]) == ("turn", attributes)
        assert same[2] == usual[2] == 1.5
        assert found[3] == expected


def test_an_error_is_short_whatever_is_sent_with_it(buffer: spans.SpanBuffer) -> None:
    """Environments and agents may fail with a page of text, which every reader of the trace would get."""
    spans.record("turn", 0.0, error="x" * 400)
    spans.record("turn", 0.0, turn=1)
    spans.record("turn", 0.0, turn=2)
    payload, _ = buffer.take_batch(3)
    assert json.loads(payload)["spans"][0][3] == {"error": "x" * 300}


def test_a_short_wait_is_kept_only_with_its_error(buffer: spans.SpanBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most calls find a free slot at once: their waits would be a fifth of all spans."""
    now = 0.0
    monkeypatch.setattr(spans, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))

    def wait(seconds: float, error: Exception | None = None) -> None:
        nonlocal now
        with contextlib.suppress(OSError), spans.recorded_unless_short("route.queued", seconds=seconds):
            now += seconds
            if error is not None:
                raise error

    wait(0.0009)
    wait(0.0011)
    wait(0.0001, OSError("gone"))
    kept = [span[3] for span in json.loads(buffer.take_batch(3)[0])["spans"]]
    assert kept == [{"seconds": 0.0011}, {"seconds": 0.0001, "error": "gone"}]


def test_a_full_buffer_drops_new_spans_and_counts_them(buffer: spans.SpanBuffer) -> None:
    """The buffer never grows beyond its bound, and says what it lost."""
    for number in range(5):
        spans.record("turn", 0.0, turn=number)
    first, _ = buffer.take_batch(2)
    second, _ = buffer.take_batch(2)
    kept = [span[3]["turn"] for payload in (first, second) for span in json.loads(payload)["spans"]]
    assert kept == [0, 1, 2]
    assert [json.loads(payload)["number"] for payload in (first, second)] == [1, 2]
    assert json.loads(first)["dropped"] == 2


def test_a_batch_that_could_not_be_sent_is_counted_once(buffer: spans.SpanBuffer) -> None:
    """By its spans; a number that is missing would count it as a message, too."""
    spans.record("turn", 0.0, turn=1)
    _, num_spans = buffer.take_batch(2)
    buffer.drop_batch(num_spans)
    spans.record("turn", 0.0, turn=2)
    batch = json.loads(buffer.take_batch(2)[0])
    assert (batch["number"], batch["dropped"], len(batch["spans"])) == (1, 1, 1)


def test_a_context_that_fails_is_recorded_with_its_error(buffer: spans.SpanBuffer) -> None:
    """The error is an attribute of the span, and is raised on."""

    def fail() -> None:
        with spans.recorded("tool", turn=0) as about:
            about["environment"] = "geo3k"
            raise ValueError("no such tool")

    with pytest.raises(ValueError, match="no such tool"):
        fail()
    ((_, _, _, attributes),) = json.loads(buffer.take_batch(1)[0])["spans"]
    assert attributes == {"turn": 0, "environment": "geo3k", "error": "no such tool"}


def test_half_an_emoji_loses_no_span(buffer: spans.SpanBuffer) -> None:
    """An error's text may hold anything."""
    spans.record("session", 0.0, error="no \ud83d", other=ValueError("\ud83d"))
    ((_, _, _, attributes),) = json.loads(buffer.take_batch(1)[0])["spans"]
    assert attributes == {"error": "no \ufffd", "other": "\ufffd"}


def test_values_that_json_lacks_do_not_fail(buffer: spans.SpanBuffer) -> None:
    """NaN becomes null and objects their text: a span never ends a process."""
    spans.record("group.played", 0.0, mean_reward=float("nan"), about={"a": 1}, other=ValueError("x"))
    ((_, _, _, attributes),) = json.loads(buffer.take_batch(1)[0])["spans"]
    assert attributes == {"mean_reward": None, "about": {"a": 1}, "other": "x"}


def test_nothing_is_kept_without_a_buffer() -> None:
    """Tests, commands and services of no run record nothing."""
    spans.record("turn", 0.0)
    assert spans.buffer() is None
