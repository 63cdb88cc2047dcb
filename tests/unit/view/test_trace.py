"""Reading the spans of a run, and writing them for Perfetto."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from services.launch.process.process_trace import ProcessTrace
from services.view import trace_reader
from services.view.trace_events import write_trace_events
from services.view.trace_reader import Loss, Span, TraceReader


def _write(folder: Path, *rows: dict[str, Any], name: str = "spans-0000000000000.jsonl") -> None:
    (folder / "trace").mkdir(exist_ok=True)
    with (folder / "trace" / name).open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _row(spans: list[Any], *, stored: float | None = 100.0, sent: float = 100.0, **changes: Any) -> dict[str, Any]:
    about = {"process": "worker-0", "host": "a", "pid": 1, "start": "s", "number": 1, "dropped": 0, "sent": sent}
    return {"sequence": 1, "stored": stored, "batch": about | {"spans": spans} | changes}


def test_clocks_that_differ_are_corrected(tmp_path: Path) -> None:
    """A host whose clock is 40 s behind is moved to the server's; the slow way of one message does not count."""
    _write(
        tmp_path,
        _row([["turn", 58.0, 1.0, {}]], sent=60.0, stored=103.0, process="far"),
        _row([["turn", 59.0, 1.0, {}]], sent=61.0, stored=101.0, process="far", number=2),
        _row([["turn", 98.5, 1.0, {}]], sent=100.0, stored=100.02, process="near"),
    )
    spans = TraceReader(tmp_path).read().spans
    assert [(span.process, span.start) for span in spans] == [("far", 98.0), ("near", 98.5), ("far", 99.0)]


@pytest.mark.parametrize("ahead_s", [-40.0, 400.0])
def test_a_trainer_whose_clock_is_off_is_on_the_others_clock(tmp_path: Path, ahead_s: float) -> None:
    """Its steps too, which it writes to a file itself, and what the launcher on its host writes; each start of it has a
    clock of its own. Files of spans are named by its clock, and found by the server's."""
    now = 1000.0 + ahead_s
    for start, later in (("t", 0.0), ("u", 500.0)):  # a second start, on a host whose clock is right
        skewed = now if start == "t" else 1000.0 + later
        host, name = f"of-{start}", f"spans-{round(1000 * (skewed - 10)):013d}.jsonl"
        _write(
            tmp_path,
            _row([["group.held", skewed - 3, 1.0, {}]], sent=skewed, stored=1000.02 + later, process="trainer",
                 host=host, start=start),
            _row([["turn", 998.0 + later, 1.0, {}]], sent=1000.0 + later, stored=1000.02 + later, start=f"w{start}"),
            name=name,
        )  # fmt: skip
        step = {"step": 1 + (start == "u"), "start": start, "spans": [["train_s", skewed - 2, 1.0]]}
        _write(tmp_path, step, name="trainer.jsonl")
    started = _row([["process", now - 4, 1.0, {}]], sent=now, stored=None, process="launcher", host="of-t", start="l")
    _write(tmp_path, started, name="launcher-0000000000000.jsonl")
    reader = TraceReader(tmp_path)
    spans = reader.read(900.0, 1100.0).spans
    assert [(span.process, span.name, pytest.approx(span.start, abs=0.05)) for span in spans] == [
        ("launcher", "process", 996.0),
        ("trainer", "group.held", 997.0),
        ("worker-0", "turn", 998.0),
        ("trainer", "train_s", 998.0),
    ]
    starts = [step["spans"][0][1] for step in reader.steps()]
    assert starts == [pytest.approx(998.0, abs=0.05), 1498.0]


def test_each_launcher_of_a_run_has_its_own_starts(tmp_path: Path) -> None:
    """In their order, also if the first one's clock is ahead, and from when a launcher begins on: it has none yet."""
    _write(tmp_path, _row([["process.starting", 9.0, 1.0, {}]], stored=None), name="launcher-4000000000000.jsonl")
    ProcessTrace(tmp_path)
    assert [[span.name for span in each] for each in TraceReader(tmp_path).starts()] == [["process.starting"], []]


def test_what_was_lost_is_counted_and_what_came_twice_is_not(tmp_path: Path) -> None:
    """Gaps in the numbers of batches and the processes' own counts say what is missing."""
    span = ["turn", 99.0, 1.0, {}]
    _write(
        tmp_path,
        _row([span]),
        _row([span]),
        _row([span], number=4, dropped=7),
        _row([span], start="again", dropped=2),
        {"sequence": 9, "stored": 1.0, "batch": {"spans": "strange"}},
    )
    trace = TraceReader(tmp_path).read()
    assert (len(trace.spans), trace.num_lost_batches, trace.num_dropped) == (3, 2, 9)


def test_a_file_that_begins_with_batches_of_the_one_before_hides_nothing_of_it(tmp_path: Path) -> None:
    """The trainer has read the stream again, which had lost its last batch."""
    first, second = ["turn", 9.0, 1.0, {}], ["turn", 45.0, 1.0, {}]
    _write(
        tmp_path,
        _row([first], stored=10.0, sent=10.0),
        _row([second], stored=46.0, sent=46.0, number=2),
        name="spans-0000000010000.jsonl",
    )
    _write(
        tmp_path,
        _row([first], stored=10.0, sent=10.0),
        _row([], stored=60.0, sent=60.0, number=3),
        name="spans-0000000060000.jsonl",
    )
    assert [span.start for span in TraceReader(tmp_path).read(40.0, 50.0).spans] == [45.0]


def test_what_was_lost_is_known_by_time_and_process(tmp_path: Path) -> None:
    """Between two batches, of which the first may be in a file before; what was lost before the oldest file is not."""
    _write(
        tmp_path,
        _row([], stored=10.0, number=5, dropped=3),
        _row([], stored=20.0, number=6, dropped=10),
        _row([], stored=10.0, process="router", host="a"),
        _row([], stored=20.0, process="router", host="b"),
        name="spans-0000000010000.jsonl",
    )
    _write(
        tmp_path,
        _row([], stored=60.0, number=9, dropped=10),
        _row([], stored=61.0, number=2, dropped=4, process="router", host="b"),
        name="spans-0000000060000.jsonl",
    )
    reader = TraceReader(tmp_path)

    def losses(first: float, last: float) -> list[Loss]:
        stream = reader.stream(first, last)
        assert not list(stream)
        return stream.losses()

    dropped = Loss(process="worker-0", start=10.0, end=20.0, num_dropped=7, num_batches=0)
    missing = Loss(process="worker-0", start=20.0, end=60.0, num_dropped=0, num_batches=2)
    routed = Loss(process="router b", start=20.0, end=61.0, num_dropped=4, num_batches=0)
    assert losses(0.0, 9.0) == []
    assert losses(12.0, 14.0) == [dropped]
    assert losses(30.0, 40.0) == [missing, routed]
    assert losses(0.0, 1e9) == [dropped, missing, routed]
    assert losses(62.0, 1e9) == []
    trace = reader.read(12.0, 14.0)
    assert (trace.num_dropped, trace.num_lost_batches) == (7, 0)


def test_what_a_long_outage_lost_is_told_in_its_midst(tmp_path: Path) -> None:
    """Both batches around it are in files that are read."""
    _write(tmp_path, _row([], stored=10.0), _row([], stored=400.0, number=2, dropped=50))
    stream = TraceReader(tmp_path).stream(150.0, 160.0)
    assert not list(stream)
    assert stream.losses() == [Loss(process="worker-0", start=10.0, end=400.0, num_dropped=50, num_batches=0)]


def test_batches_in_files_that_are_passed_over_are_not_lost(tmp_path: Path) -> None:
    """A later file has a long span of the asked time, the one between them none."""
    names = [f"spans-{1000 * began:013d}.jsonl" for began in (10, 500, 900)]
    for number, (began, name) in enumerate(zip((10.0, 500.0, 900.0), names, strict=True), start=1):
        span = ["turn", began - 5, 1.0, {}] if number < 3 else ["episode", 20.0, 875.0, {}]
        _write(tmp_path, _row([span], stored=began, sent=began, number=number), name=name)
    stream = TraceReader(tmp_path).stream(0.0, 30.0)
    assert sorted(span.name for span in stream) == ["episode", "turn"]
    assert stream.losses() == []


def test_only_the_asked_time_is_returned(tmp_path: Path) -> None:
    """Spans of all files that overlap the time, and the trainer's parts with them."""
    _write(tmp_path, _row([["turn", 10.0, 5.0, {}]]), name="spans-0000000010000.jsonl")
    both = _row([["turn", 20.0, 5.0, {}], ["turn", 40.0, 5.0, {}]], start="t")
    _write(tmp_path, both, name="spans-0000000020000.jsonl")
    _write(tmp_path, {"step": 3, "spans": [["train_s", 24.0, 2.0], ["wait_s", 50.0, 1.0]]}, name="trainer.jsonl")
    spans = TraceReader(tmp_path).read(22.0, 30.0).spans
    assert [(span.process, span.name, span.start) for span in spans] == [
        ("worker-0", "turn", 20.0),
        ("trainer", "train_s", 24.0),
    ]
    assert spans[1].attributes == {"step": 3}


def test_a_time_late_in_a_long_run_costs_no_spans_of_its_earlier_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open Fleet page asks for the last minutes again and again. A long push of an earlier step belongs to them."""
    made: list[tuple[int, str]] = []

    def make(**about: Any) -> Span:
        made.append((about["attributes"]["step"], about["name"]))
        return Span(**about)

    monkeypatch.setattr(trace_reader, "Span", make)
    for step in range(500):
        pushes = [["push", 4009.0, 900.0]] if step == 400 else []
        row = {"step": step, "spans": [["train_s", 10.0 * step, 9.0], *pushes]}
        _write(tmp_path, row, name="trainer.jsonl")
    spans = list(TraceReader(tmp_path).stream(4900.0, 4980.0))
    assert [span.name for span in spans] == ["push", *["train_s"] * 9]
    assert made == [(400, "push"), *((step, "train_s") for step in range(490, 499))]


@pytest.mark.parametrize("ahead_s", [0.0, 400.0])
def test_a_span_that_ends_in_a_later_file_is_returned(tmp_path: Path, ahead_s: float) -> None:
    """A long episode is stored when it ends, by a clock that may be off; files of other times are not read for it."""

    def write(name: str, number: int, *spans: tuple[float, float]) -> None:
        ended = max(start + seconds for start, seconds in spans)
        skewed = [["episode", start + ahead_s, seconds, {}] for start, seconds in spans]
        row = _row(skewed, sent=ended + ahead_s, stored=ended + 0.01, number=number)
        _write(tmp_path, row, name=f"spans-{name}.jsonl")

    write("0000001000000", 1, (1000.0, 1.0))
    write("0000001300000", 2, (1290.0, 10.0))
    reader = TraceReader(tmp_path)
    assert [span.start for span in reader.read(1100.0, 1150.0).spans] == []
    write("0000001300000", 3, (1020.0, 479.0))  # the file goes on
    write("0000001600000", 4, (1500.0, 100.0))
    spans = reader.read(1100.0, 1150.0).spans
    assert [(span.start, span.seconds) for span in spans] == [(pytest.approx(1020.0, abs=0.05), 479.0)]
    assert [span.seconds for span in reader.read(1000.0, 1010.0).spans] == [1.0]


def test_processes_of_one_name_on_two_hosts_are_two(tmp_path: Path) -> None:
    """Workers that were started by hand are all called worker; a restart of one is still the same process."""
    span = ["turn", 99.0, 1.0, {}]
    _write(tmp_path, _row([span]), _row([span], host="b"), _row([span], start="again"), _row([span], process="router"))
    names = [span.process for span in TraceReader(tmp_path).read().spans]
    assert sorted(names) == ["router", "worker-0 a", "worker-0 a", "worker-0 b"]


def test_the_export_is_in_the_trace_event_format() -> None:
    """Complete events in microseconds; each process and lane has a name; events of one lane do not overlap."""
    spans = [
        Span(process="worker-0", name="turn", start=10.0, seconds=2.0, attributes={"turn": 0}),
        Span(process="router", name="route.attempt", start=10.5, seconds=1.0, attributes={}),
        Span(process="worker-0", name="turn", start=11.0, seconds=2.0, attributes={}),
        Span(process="worker-0", name="turn", start=12.0, seconds=0.5, attributes={}),
    ]
    file = io.BytesIO()
    num_events = write_trace_events(spans, file)
    events = json.loads(file.getvalue())["traceEvents"]
    assert len(events) == num_events
    names = {(each["name"], each["pid"], each["tid"]): each["args"]["name"] for each in events if each["ph"] == "M"}
    bars = [each for each in events if each["ph"] == "X"]
    assert [(each["ts"], each["dur"]) for each in bars] == [(0, 2e6), (5e5, 1e6), (1e6, 2e6), (2e6, 5e5)]
    assert bars[0]["args"] == {"turn": 0}
    assert {names["process_name", each["pid"], each["pid"]] for each in bars} == {"worker-0", "router"}
    assert all(("thread_name", each["pid"], each["tid"]) in names for each in bars)
    turns = [each["tid"] for each in bars if each["name"] == "turn"]
    assert turns[0] != turns[1]
    assert turns[2] == turns[0]  # free again


def test_an_empty_trace_is_valid_json() -> None:
    """No spans are no events."""
    file = io.BytesIO()
    assert write_trace_events([], file) == 0
    assert json.loads(file.getvalue())["traceEvents"] == []
