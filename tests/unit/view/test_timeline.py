"""The spans that the timeline draws, and the samples to which they lead."""

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

from services.view.run_reader import RunReader
from services.view.timeline import timeline_of
from services.view.trace_reader import Span

_DOCS = Path(__file__).parents[3] / "docs" / "operation"
_INDEX = [
    {"group": "run/3", "attempt": 0, "number": 7},
    {"group": "run-step-20/3", "attempt": 1, "number": 8},
    {"group": "run/3", "attempt": 1, "number": 9},
]


def _span(name: str, *, start: float = 10.0, seconds: float = 1.0, **attributes: Any) -> Span:
    return Span(process="engine-0", name=name, start=start, seconds=seconds, attributes=attributes)


def test_a_call_leads_to_the_sample_that_it_played() -> None:
    """By its request, which begins with group and sample; of an agent's calls only the group is known. Groups of an
    evaluation have the same numbers as groups of the run."""
    spans = [
        _span("call", group="run/3/1/abc", request="run/3/1/abc/5/2/ffff"),
        _span("call", group="run/3/1/abc", request="chat-17"),
        _span("call", group="run/4/0/abc", request="run/4/0/abc/0/0/ffff"),
        _span("call", request="somebody's"),
        _span("episode", group="run/3/0/abc", sample=7),
        _span("episode", group="run-step-20/3/1/abc", sample=1),
    ]
    drawn = timeline_of(spans, _INDEX)["spans"]
    found = [(each["group"], each["sample"], each["number"]) for each in drawn]
    assert found == [(3, 5, 9), (3, None, 9), (4, 0, None), (None, None, None), (3, 7, 7), (3, 1, 8)]


def test_what_a_worker_s_slots_play_is_drawn() -> None:
    """A group each, with its rewards; one that is lost says why."""
    played = {"group": "run/3/1/abc", "delivery": 1, "num_samples": 4, "mean_reward": 0.25, "endings": {"stop": 4}}
    spans = [_span("group.played", **played), _span("group.played", group="run/4/0/abc", error="picture is gone")]
    first, second = timeline_of(spans, _INDEX)["spans"]
    assert {key: first[key] for key in ("name", "group", "sample", "number", "num_samples", "mean_reward")} == {
        "name": "group.played", "group": 3, "sample": None, "number": 9, "num_samples": 4, "mean_reward": 0.25,
    }  # fmt: skip
    assert (second["group"], second["error"]) == (4, "picture is gone")


def test_stages_of_pushes_are_drawn_as_engines_saw_them() -> None:
    """As the trainer saw them only where they failed: an engine that is dead or hangs records none."""
    stage = {"stage": "receive", "version": 5, "push": "v5"}
    spans = [
        _span("push.received", **stage),
        _span("push.stage", **stage, replica="engine-1"),
        _span("push.stage", **stage, replica="engine-2", error="exceeded its deadline"),
        _span("push.stage", **stage, replica="engine-3", error=""),  # the run ended meanwhile
    ]
    drawn = timeline_of(spans, [])["spans"]
    about = [{key: each.get(key) for key in ("name", "stage", "version", "replica", "error")} for each in drawn]
    assert about == [
        {"name": "push.received", "stage": "receive", "version": 5, "replica": None, "error": None},
        {
            "name": "push.stage",
            "stage": "receive",
            "version": 5,
            "replica": "engine-2",
            "error": "exceeded its deadline",
        },
    ]


def test_the_documentation_names_what_is_not_drawn() -> None:
    """Of all spans that processes record, by their names; a lane for each of the others is tested with the page."""
    recorded = re.findall(r"^\| `([a-z.]+)` \|", (_DOCS / "tracing.md").read_text(), re.MULTILINE)
    drawn = {each["name"] for each in timeline_of([_span(name, error="it broke") for name in recorded], [])["spans"]}
    (listed,) = re.findall(
        r"^Only the export for Perfetto has (.*?);", (_DOCS / "viewing.md").read_text(), re.MULTILINE
    )
    assert set(re.findall(r"`([a-z.]+)`", listed)) == {*recorded} - drawn


def test_no_more_spans_are_held_than_are_drawn(tmp_path: Path) -> None:
    """A long run has gigabytes of them. Files are read one after the other, and the longest spans are kept."""
    (tmp_path / "trace").mkdir()
    num_bytes = 0
    for number in range(8):
        began = 1000.0 + 100 * number
        spans = [
            ["call", began, place / 10 + number + 1, {"request": f"run/{place}/0/abc/0/0/ffff"}]
            for place in range(1000)
        ]
        lines = [
            json.dumps({"sequence": 1, "stored": began, "batch": {
                "process": "rollout-0", "host": "a", "pid": 1, "start": "s", "number": 10 * number + each,
                "dropped": 0, "sent": began, "spans": spans[100 * each :][:100]}}) + "\n"
            for each in range(10)
        ]  # fmt: skip
        path = tmp_path / "trace" / f"spans-{round(1000 * began):013d}.jsonl"
        num_bytes += path.write_text("".join(lines))
    run = RunReader(tmp_path)
    tracemalloc.start()
    try:
        found = timeline_of(run.spans(0.0, 1e9), [], most=10)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found["num_left_out"], len(found["spans"])) == (7990, 10)
    longest = sorted((place / 10 + number + 1 for number in range(8) for place in range(1000)), reverse=True)[:10]
    assert sorted((each["length"] for each in found["spans"]), reverse=True) == longest
    assert most_bytes < num_bytes


def test_of_too_many_spans_the_longest_are_drawn() -> None:
    """In order of their start, and the page says how many are missing."""
    lengths = (3.0, 1.0, 0.0001, 2.0)
    spans = [_span("call", start=float(start), seconds=seconds) for start, seconds in enumerate(lengths)]
    found = timeline_of([*spans, _span("turn", seconds=9.0)], [], most=2)
    assert [each["start"] for each in found["spans"]] == [0.0, 3.0]
    assert found["num_left_out"] == 1
