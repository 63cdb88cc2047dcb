"""A run folder whose writer was killed in the middle of a line, at any byte: readers have what was whole."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.cli.app import main
from services.launch.process.process_trace import ProcessTrace
from services.trainer.replay.run import RecordedRun
from services.trainer.telemetry.metrics_log import MetricsLog
from services.trainer.telemetry.trace import TrainerTrace
from services.view.episode_query import EpisodeQuery
from services.view.export.page import export_runs
from services.view.run_reader import NotThereError, RunReader
from services.view.summary import fleet_now
from services.view.trace_events import write_trace_events
from services.view.trace_reader import TraceReader
from tests.support.view_runs import add_spans, make_run

NUM_STEPS = 2
METRICS, EVALUATIONS, INDEX = "metrics.jsonl", "evaluations.jsonl", "episodes/index.jsonl"
STEPS, SPANS, STARTS = "trace/trainer.jsonl", "trace/spans-1700000000000.jsonl", "trace/launcher-1700000000000.jsonl"
GROUPS = "episodes/step-000001.jsonl"
FILES = (METRICS, EVALUATIONS, INDEX, GROUPS, STEPS, SPANS, STARTS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small run with a file of each kind; spans and starts are in two batches."""
    run = make_run(tmp_path / "run", num_steps=NUM_STEPS)
    add_spans(run, num_steps=NUM_STEPS)
    for name in (EVALUATIONS, STARTS):
        row = json.loads((run / name).read_text())
        second = {**row, "step": NUM_STEPS}
        if name == STARTS:
            first, *others = row["batch"]["spans"]
            row["batch"]["spans"] = [first]
            second = {**row, "batch": {**row["batch"], "number": 2, "spans": others}}
        (run / name).write_text(json.dumps(row) + "\n" + json.dumps(second) + "\n")
    return run


def read(run: RunReader, name: str) -> Sequence[Any]:
    """The records that pages have of a file; of kept groups, the numbers of those that can be read."""
    if name == GROUPS:
        return [number for number in range(NUM_STEPS) if has_group(run, number)]
    if name == SPANS:
        return sorted({span.process for span in run.spans(0.0, 1e12)} & {"rollout-0", "router"})
    if name == STARTS:
        return [(span.name, span.attributes["service"]) for launcher in run.starts() for span in launcher]
    reads: dict[str, Callable[[], Sequence[Any]]] = {
        METRICS: lambda: run.steps()[1],
        EVALUATIONS: run.evaluations,
        INDEX: run.episodes,
        STEPS: run.trace,
    }
    return reads[name]()


def has_group(run: RunReader, number: int) -> bool:
    """Whether a kept group can be read; where it can, it is whole."""
    try:
        return json.loads(run.episode(number))["step"] == number + 1
    except NotThereError:
        return False


def read_all(folder: Path) -> None:
    """Read the folder in every way that takes longer: `penstock status`, `replay`, both exports, a search."""
    run = RunReader(folder)
    for name in FILES:
        read(run, name)
    assert main(["status", str(folder), "--json"]) == 0
    fleet_now(run)
    assert len(run.find_episodes(EpisodeQuery(text="corners"))[1].places) == len(run.episodes())
    assert [RecordedRun(folder).metrics(row["step"]) for row in run.steps()[1]] == run.steps()[1]
    assert export_runs([run]).page
    write_trace_events(TraceReader(folder).read().spans, io.BytesIO())


@pytest.mark.parametrize("name", FILES)
def test_every_reader_has_what_was_whole(folder: Path, name: str) -> None:
    """The records of all lines before the cut, and everything of the other files."""
    data, whole = (folder / name).read_bytes(), {each: read(RunReader(folder), each) for each in FILES}
    known = [whole[name][:num_lines] for num_lines in range(data.count(b"\n") + 1)]
    if name == STARTS:  # the second line has two spans
        known[-1] = whole[STARTS]
    if name == GROUPS:  # it has the first group
        known = [whole[GROUPS][1:], whole[GROUPS]]
    assert known[-1] == whole[name] != known[-2]
    for cut in range(len(data) + 1):
        (folder / name).write_bytes(data[:cut])
        assert read(RunReader(folder), name) == known[data[:cut].count(b"\n")]
    ends = [place for place, byte in enumerate(data, start=1) if byte == ord("\n")]
    for cut in {0, 1, *(end + near for end in ends for near in (-2, -1, 0, 1) if end + near <= len(data))}:
        (folder / name).write_bytes(data[:cut])
        read_all(folder)
        for other in {*FILES} - {name, GROUPS}:
            assert read(RunReader(folder), other) == whole[other]


@pytest.mark.parametrize("name", [METRICS, STEPS])
def test_a_restarted_trainer_goes_on_behind_the_last_whole_line(folder: Path, name: str) -> None:
    """Its line joins no other, and readers that follow the file have both."""
    data = (folder / name).read_bytes()
    for cut in range(len(data) + 1):
        (folder / name).write_bytes(data[:cut])
        run = RunReader(folder)
        run.steps()
        run.trace()
        num_steps = len([line for line in data[:cut].split(b"\n") if line.endswith(b"}") and is_object(line)])
        if name == METRICS:
            MetricsLog(folder, last_step=num_steps).write({"step": num_steps + 1})
        else:
            TrainerTrace(folder, last_step=num_steps).write(num_steps + 1, [("train_s", 0.0, 1.0)])
        rows = run.steps()[1] if name == METRICS else run.trace()
        assert [row["step"] for row in rows] == [*range(1, num_steps + 2)]
        assert all(is_object(line) for line in (folder / name).read_bytes().splitlines())


def is_object(line: bytes) -> bool:
    """Whether this is a whole line."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def test_a_restarted_launcher_joins_no_half_line(folder: Path) -> None:
    """What it starts is in a file of its own."""
    data = (folder / STARTS).read_bytes()
    (folder / STARTS).write_bytes(data[:-20])
    ProcessTrace(folder).add("process.starting", 0.0, 1.0, service="router", start=1)
    assert [[span.attributes["service"] for span in each] for each in RunReader(folder).starts()] == [
        ["rollout-0"],
        ["router"],
    ]
