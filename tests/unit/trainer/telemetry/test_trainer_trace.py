"""The trainer's own file in the trace."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.telemetry import spans
from services.trainer.telemetry.trace import FILE, TrainerTrace


@pytest.fixture
def buffer() -> Iterator[spans.SpanBuffer]:
    """The spans of this process."""
    yield spans.open_buffer("trainer")
    spans.close_buffer()


def test_a_line_names_the_start_of_the_trainer_whose_clock_it_has(tmp_path: Path, buffer: spans.SpanBuffer) -> None:
    """As its batches of spans do, by which a reader finds how far that clock is off."""
    TrainerTrace(tmp_path, last_step=0).write(1, [("train_s", time.monotonic(), 1.0)])
    line = json.loads((tmp_path / FILE).read_text())
    buffer.add("group.held", 0.0, 1.0, {})
    assert line["start"] == json.loads(buffer.take_batch(1)[0])["start"]
