"""The run's metrics: one JSON object per step, in the order of the weights' surviving history.

Invariant: the file has each step at most once. When a run continues from a checkpoint, the lines that a crashed trainer
wrote after it are moved to a separate file.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EXACT = frozenset({"loss", "grad_norm"})
"""Metrics that a replay must reproduce bit for bit."""


class MetricsLog:
    """Appends to `metrics.jsonl` in the run folder, or to a file of another name."""

    def __init__(
        self, folder: Path, *, last_step: int, last_row: Mapping[str, Any] | None = None, name: str = "metrics"
    ) -> None:
        """Continue after `last_step`; move later lines to `metrics-discarded.jsonl`. Reads the whole file.

        Args:
            folder: The run folder.
            last_step: Step of the checkpoint that the run continues from; 0 for a new run.
            last_row: The step's metrics from that checkpoint; written if the trainer died before it wrote them.
            name: Name of the file, without its suffix.
        """
        self._path = folder / f"{name}.jsonl"
        text = self._path.read_text() if self._path.exists() else ""
        lines = text.splitlines()
        is_kept = [_step_of(line) <= last_step for line in lines]
        if not all(is_kept):
            with (folder / f"{name}-discarded.jsonl").open("a") as discarded:
                discarded.writelines(f"{line}\n" for line, kept in zip(lines, is_kept, strict=True) if not kept)
        if not (all(is_kept) and text[-1:] in ("", "\n")):
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text("".join(f"{line}\n" for line, kept in zip(lines, is_kept, strict=True) if kept))
            os.replace(temporary, self._path)
        if last_row and last_step not in map(_step_of, lines):
            self.write(dict(last_row))

    def write(self, row: dict[str, Any]) -> None:
        """Append one step."""
        with self._path.open("a") as file:
            file.write(json.dumps({key: as_logged(key, value) for key, value in row.items()}) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """Return all steps so far."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a crash truncated the line


def as_logged(key: str, value: Any) -> Any:
    """Return the value as logged: floats with six significant digits, but all digits for metrics in `EXACT`."""
    return float(f"{value:.6g}") if isinstance(value, float) and key not in EXACT else value
