"""The trainer's time, part by part, in `trace/trainer.jsonl` of the run folder: one line for each step."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.telemetry import spans
from penstock.telemetry.json_lines import append_lines
from services.trainer.telemetry.metrics_log import keep_steps

FILE = "trace/trainer.jsonl"
_SHORTEST_S = 0.001
"""Seconds; shorter parts are left out."""


class TrainerTrace:
    """Appends to the file. Its times are seconds since 1970 by this machine's clock.

    Each line names the start of the trainer, by which its reader finds how far the clock is off (`trace_reader.py`).
    """

    def __init__(self, folder: Path, *, last_step: int) -> None:
        """Continue after `last_step`; later lines are moved away, as those of metrics.jsonl are."""
        self._path = folder / FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        keep_steps(self._path, last_step=last_step)

    def write(self, step: int, parts: Sequence[tuple[str, float, float]]) -> None:
        """Append a step. Blocks.

        Args:
            step: Its number.
            parts: Name, start by `time.monotonic`, and seconds of each.
        """
        shift = time.time() - time.monotonic()
        written = [
            [name, round(start + shift, 4), round(length, 4)] for name, start, length in parts if length >= _SHORTEST_S
        ]
        buffer = spans.buffer()
        about = {} if buffer is None else {"start": buffer.start}
        append_lines(self._path, (json.dumps({"step": step, **about, "spans": written}) + "\n").encode())
