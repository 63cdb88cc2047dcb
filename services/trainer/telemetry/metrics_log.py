"""The run's metrics: one JSON object per step, in the order of the weights' surviving history.

Each row also says when it was written:

- `time`: UTC, ISO 8601;
- `trainer_start`: the number of the trainer's start that wrote it, from 1;
- `trainer_deaths`: how many of the starts before it died;
- `elapsed_s`: the seconds that this trainer and those before it had run, without the pauses between them.

A trainer that dies leaves a file, `metrics-running`.

Invariant: the file has each step at most once. When a run continues from a checkpoint, the lines that a crashed trainer
wrote after it are moved to a separate file.
"""

import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.runtime.files import write_atomically
from penstock.telemetry.json_lines import JsonLinesFollower, append_lines, every_field, read_object

EXACT = frozenset({"loss", "grad_norm"})
"""Metrics that a replay must reproduce bit for bit."""


class MetricsLog:
    """Appends to `metrics.jsonl` in the run folder, or to a file of another name."""

    restored: Mapping[str, Any] | None
    """The checkpoint's row, if the trainer died before it wrote that of its step; None if the file had one."""

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
        found = _rows(self._path)
        self._trainer_start = 1 + max((row.get("trainer_start", 0) for row in found), default=0)
        self._mark = folder / f"{name}-running"
        self._trainer_deaths = max((row.get("trainer_deaths", 0) for row in found), default=0)
        if self._mark.exists():
            self._trainer_deaths = 1 + max(self._trainer_deaths, _number_in(self._mark))
        self._mark.write_text(str(self._trainer_deaths))  # those that die before their first row are counted, too
        keep_steps(self._path, last_step=last_step)
        kept = [row for row in found if _step_of(row) <= last_step]
        self._started = time.monotonic() - max((row.get("elapsed_s", 0.0) for row in kept), default=0.0)
        self.restored = last_row if last_row and last_step not in map(_step_of, kept) else None
        if self.restored is not None:
            self.write(dict(self.restored))

    def write(self, row: dict[str, Any]) -> None:
        """Append one step. Blocks."""
        stamp = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "trainer_start": self._trainer_start,
            "trainer_deaths": self._trainer_deaths,
            "elapsed_s": round(time.monotonic() - self._started, 3),
        }
        logged = {key: as_logged(key, value) for key, value in row.items()}
        append_lines(self._path, (json.dumps(logged | stamp) + "\n").encode())

    def note_progress(self) -> None:
        """Note that the next row is being computed: viewers take the time of the file for that."""
        self._path.touch()

    def end(self) -> None:
        """Note that the trainer ends as it should, at its last step or because it was asked to."""
        self._mark.unlink(missing_ok=True)

    def rows(self, keep: Callable[[str], bool] = every_field) -> list[dict[str, Any]]:
        """Return all steps so far, with the metrics that `keep` tells to keep. Of a long run it takes half a minute."""
        return JsonLinesFollower(self._path, keep=keep).poll()


def has_steps(folder: Path) -> bool:
    """Return whether the newest run in this folder has taken a step. Blocks."""
    path = folder / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


def keep_steps(path: Path, *, last_step: int) -> None:
    """Move the lines after a step, and one that a crash cut off, to the file's -discarded sibling. Blocks.

    Args:
        path: A file of JSON objects with a `step`, one a line; it need not exist.
        last_step: The last step to keep.
    """
    keep_lines(path, lambda row: _step_of(row) <= last_step)


def keep_lines(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> None:
    """Move the lines that are not to be kept to the file's -discarded sibling. Blocks.

    Args:
        path: A file of JSON objects, one a line; it need not exist.
        keep: Tells whether to keep the line of an object, which is empty for a line that a crash cut off.
    """
    text = path.read_text(errors="replace") if path.exists() else ""
    lines = [line for line in text.split("\n") if line]  # not at other ends of lines, which strings may hold
    is_kept = [keep(read_object(line)) for line in lines]
    if not all(is_kept):
        discarded = "".join(f"{line}\n" for line, kept in zip(lines, is_kept, strict=True) if not kept)
        append_lines(path.with_name(f"{path.stem}-discarded.jsonl"), discarded.encode())
    if not (all(is_kept) and text[-1:] in ("", "\n")):
        write_atomically(path, "".join(f"{line}\n" for line, kept in zip(lines, is_kept, strict=True) if kept))


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file, which need not exist."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return [row for line in text.split("\n") if (row := read_object(line))]


def _number_in(path: Path) -> int:
    text = path.read_text(errors="replace")
    return int(text) if text.isdecimal() else 0


def _step_of(row: Mapping[str, Any]) -> float:
    step = row.get("step")
    return step if isinstance(step, int) else float("inf")


def as_logged(key: str, value: Any) -> Any:
    """Return the value as logged: floats with six significant digits, but all digits of whole numbers and of metrics in
    `EXACT`.
    """
    if not isinstance(value, float) or value.is_integer() or key in EXACT:
        return value
    return float(f"{value:.6g}")
