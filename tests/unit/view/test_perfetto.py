"""The exported trace is shown whole by Perfetto, whose importer drops what it cannot place."""

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

from services.view.trace_events import write_trace_events
from services.view.trace_reader import Span, TraceReader
from tests.support.perfetto import find_faults
from tests.support.view_runs import add_spans, make_run


def _exported(spans: list[Span]) -> bytes:
    file = io.BytesIO()
    write_trace_events(sorted(spans, key=lambda span: span.start), file)
    return file.getvalue()


def _slices(data: bytes) -> list[dict[str, Any]]:
    return [event for event in json.loads(data)["traceEvents"] if event["ph"] == "X"]


def test_a_recorded_run_is_shown_whole(tmp_path: Path) -> None:
    """Spans of trainer, engine, router and launcher: each is a slice, with its time and its length."""
    add_spans(make_run(tmp_path, num_steps=30), num_steps=30)
    spans = TraceReader(tmp_path).read().spans
    data = _exported(spans)
    assert find_faults(data) == []
    wanted = [(span.name, round((span.start - spans[0].start) * 1e6), round(span.seconds * 1e6)) for span in spans]
    assert [(event["name"], event["ts"], event["dur"]) for event in _slices(data)] == wanted


def test_spans_that_touch_do_not_overlap_after_rounding() -> None:
    """Seconds since 1970 have a rounding error of a tenth of a microsecond, and Perfetto counts nanoseconds."""
    draw, spans = random.Random(0), []
    for process in range(20):
        now = 1_700_000_000.0 + draw.random()
        for _ in range(500):
            length = draw.choice((0.0, 1e-6, draw.uniform(0, 1e-5), draw.uniform(0, 1)))
            spans.append(Span(process=f"{process}", name="turn", start=now, seconds=length, attributes={}))
            now += length
    data = _exported(spans)
    assert find_faults(data) == []
    threads = {(event["pid"], event["tid"]) for event in _slices(data)}
    assert len(threads) < 3 * 20, "spans that touch share a thread, but for a few that rounding makes overlap"


def test_spans_of_one_name_that_overlap_are_all_shown() -> None:
    """A worker plays hundreds of turns at once; equal beginnings, ends and instants are among them."""
    draw = random.Random(1)
    times = [(draw.randrange(50), draw.randrange(20)) for _ in range(2000)]
    spans = [
        Span(process=f"worker-{number % 3}", name="turn", start=1e9 + start / 8, seconds=length / 8, attributes={})
        for number, (start, length) in enumerate(times)
    ]
    data = _exported(spans)
    assert find_faults(data) == []
    assert len(_slices(data)) == 2000


def test_a_strange_span_spoils_nothing() -> None:
    """Whoever has the run's token may send any; the others stay as they are."""
    spans = [
        Span(process="strange", name='"\n\u2028é', start=5.0, seconds=-1.0, attributes={"\x00": [None, {"x": 1e300}]}),
        Span(process="worker", name="turn", start=6.0, seconds=1.0, attributes={}),
    ]
    data = _exported(spans)
    assert find_faults(data) == []
    assert [(event["ts"], event["dur"]) for event in _slices(data)] == [(0, 0), (1_000_000, 1_000_000)]


def _trace(*events: dict[str, Any]) -> bytes:
    names = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "args": {"name": "worker"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "turn"}},
    ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": [*names, *events]}).encode()


def _event(phase: str, ts: float, *, name: str = "turn", **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": 1, "tid": 2, "ts": ts, **fields}


def test_the_reader_accepts_what_perfetto_shows() -> None:
    """Nested and touching slices, pairs of begin and end, and a flow from one slice to another."""
    assert not find_faults(
        _trace(
            _event("X", 0, dur=10),
            _event("X", 2, dur=8),
            _event("s", 3, name="flow", id=7),
            _event("X", 10, dur=0),
            _event("B", 12.5),
            _event("f", 13, name="flow", id=7, bp="e"),
            _event("E", 14),
        )
    )


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([_event("X", 0, dur=10), _event("X", 5, dur=10)], "overlaps"),
        ([_event("X", 0, dur=10.0), _event("X", 9.999, dur=1)], "overlaps"),
        ([_event("X", 0)], "dur = None"),
        ([_event("X", 0, dur=-1)], "dur = -1"),
        ([_event("X", -1, dur=1)], "ts = -1"),
        ([_event("X", "0", dur=1)], "ts = '0'"),
        ([_event("Y", 0)], "ph = 'Y'"),
        ([_event("B", 0)], "never ends"),
        ([_event("E", 0)], "ends no slice"),
        ([_event("B", 0), _event("E", 1, name="other")], "ends no slice"),
        ([_event("X", 0, dur=1, pid="worker")], "pid = 'worker'"),
        ([_event("X", 0, dur=1, tid=3)], "no name yet"),
        ([{"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "again"}}], "has a name already"),
        ([{"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "main"}}], "has a name already"),
        ([{"ph": "M", "name": "thread_name", "pid": 1, "tid": 3, "args": {"name": ""}}], "thread_name = "),
        ([_event("X", 0, dur=9), _event("s", 1, name="flow", id=7)], "has no end"),
        ([_event("X", 0, dur=9), _event("f", 1, name="flow", id=7, bp="e")], "ends before it begins"),
        ([_event("X", 0, dur=9), _event("s", 1, name="flow")], "without an id"),
        (
            [_event("X", 0, dur=1), _event("s", 5, name="flow", id=7), _event("f", 6, name="flow", id=7, bp="e")],
            "is in no slice",
        ),
    ],
)
def test_the_reader_finds_each_fault(events: list[dict[str, Any]], fault: str) -> None:
    """Otherwise the tests above prove nothing."""
    assert fault in "\n".join(find_faults(_trace(*events)))
