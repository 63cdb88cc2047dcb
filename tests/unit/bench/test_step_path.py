"""Where the steps of `make bench-async` wait, from the files of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.async_loop.step_path import step_path
from penstock.bus.span_stream import StoredBatch
from services.trainer.telemetry.span_files import SpanFiles


def span(name: str, start: float, end: float, group: int) -> list[Any]:
    return [name, start, end - start, {"group": f"run/{group}/0/epoch"}]


def test_the_parts_of_a_step_are_those_between_its_samples_and_the_next_ones(tmp_path: Path) -> None:
    """Steps of one group each: the trainer waits for the first, computes another part of the second when its last
    sample ends, and step two when the third one's does; of the fourth the trace has nothing."""
    sent = [
        span("route.attempt", 10.0, 12.0, 0),
        span("route.attempt", 10.0, 13.0, 0),
        span("route.attempt", 10.0, 16.5, 1),
        span("route.attempt", 17.0, 18.5, 3),
        span("group.queued", 15.1, 15.2, 2),
        span("route.attempt", 15.8, 18.0, 2),
        span("route.attempt", 16.8, 18.0, 2),
    ]
    batch = {"process": "worker", "host": "a", "start": "1", "number": 1, "dropped": 0, "sent": 20.0, "spans": sent}
    SpanFiles(tmp_path, max_bytes=2**20).append(
        [StoredBatch(sequence=1, stored_at=20.0, payload=json.dumps(batch).encode())]
    )
    steps = [
        {"step": 1, "spans": [["train_s", 13.2, 1.8], ["push", 15.0, 0.3]]},
        {"step": 2, "spans": [["train_s", 16.0, 1.0], ["train_s", 17.0, 2.0], ["push", 19.1, 0.5]]},
        {"step": 3, "spans": [["train_s", 19.2, 1.0], ["push", 20.2, 0.4]]},
    ]
    (tmp_path / "trace/trainer.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    rows = [{"step": step, "groups": [group]} for step, group in ((1, 0), (2, 1), (3, 3), (4, 4))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = step_path(tmp_path, range(1, 2))
    assert (first.delivered_s, first.pushed_s, first.begun_s) == pytest.approx((0.2, 0.3, 0.7))
    others = step_path(tmp_path, range(2, 5))
    assert (others.delivered_s, others.pushed_s, others.begun_s) == (None, pytest.approx(0.5), None)
