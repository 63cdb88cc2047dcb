"""Tells from a run's files whether an evaluation is being played."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.view.run_reader import written_at


def answered_at(
    folder: Path, rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]
) -> float | None:
    """Return when the evaluation of the last step's weights that is being played had its last answer, or began.

    Only such an evaluation may hold up the next step. The time is in seconds since 1970; None if there is none.

    Args:
        folder: The run folder; the run goes on.
        rows: The steps so far.
        evaluations: The evaluations that have ended.
    """
    step = rows[-1]["step"] if rows else 0
    if any(each.get("step") == step for each in evaluations):
        return None
    return written_at(folder / "evaluations" / f"step-{step:06d}" / "samples.jsonl") or None
