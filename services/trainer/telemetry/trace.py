"""The trainer's time, span by span, in `trace/trainer.jsonl` of the run folder: one line for each step."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from services.trainer.telemetry.metrics_log import keep_steps

FILE = "trace/trainer.jsonl"
_SHORTEST_S = 0.001
"""Seconds; shorter spans are left out."""


class TrainerTrace:
    """Appends to the file. Its times are seconds since 1970, as samples have them."""

    def __init__(self, folder: Path, *, last_step: int) -> None:
        """Continue after `last_step`; later lines are moved away, as those of metrics.jsonl are."""
        self._path = folder / FILE
        self._path.parent.mkdir(parents=True, exist_ok=True)
        keep_steps(self._path, last_step=last_step)

    def write(self, step: int, spans: Sequence[tuple[str, float, float]]) -> None:
        """Append a step.

        Args:
            step: Its number.
            spans: Name, start by `time.monotonic`, and seconds of each.
        """
        shift = time.time() - time.monotonic()
        written = [
            [name, round(start + shift, 4), round(length, 4)] for name, start, length in spans if length >= _SHORTEST_S
        ]
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "spans": written}) + "\n")
