"""The run's metrics: one JSON object per optimizer step, in the order of the weights' surviving history.

Invariant: a step stands in the file at most once. What a crashed trainer wrote after its last checkpoint is moved to a
file of its own when the run goes on from that checkpoint.
"""

import json
import os
from pathlib import Path
from typing import Any

EXACT = frozenset({"loss", "grad_norm"})
"""Metrics that a replay must reproduce to the bit."""


class MetricsLog:
    """Appends to `metrics.jsonl` in the run folder."""

    def __init__(self, folder: Path, *, last_step: int) -> None:
        """Go on after `last_step`; later lines are moved to `metrics-discarded.jsonl`."""
        self._path = folder / "metrics.jsonl"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        kept = [line for line in lines if _step_of(line) <= last_step]
        if len(kept) < len(lines):
            with (folder / "metrics-discarded.jsonl").open("a") as discarded:
                discarded.writelines(f"{line}\n" for line in lines if line not in set(kept))
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text("".join(f"{line}\n" for line in kept))
            os.replace(temporary, self._path)

    def write(self, row: dict[str, Any]) -> None:
        """Append one step."""
        with self._path.open("a") as file:
            file.write(json.dumps({key: as_logged(key, value) for key, value in row.items()}) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All steps so far."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line that a crash cut short


def as_logged(key: str, value: Any) -> Any:
    """Return the value as the log holds it: floats with six significant digits, but those of `EXACT` with all."""
    return float(f"{value:.6g}") if isinstance(value, float) and key not in EXACT else value
