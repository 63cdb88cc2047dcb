"""Tells from a run's files whether an evaluation is being played that steps may wait for."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.view.run_reader import read_settings, written_at


def answered_at(
    folder: Path, rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]
) -> float | None:
    """Return when the evaluation that may hold up the run had its last answer, or began.

    That is the evaluation of the last step's weights. If that one has not begun, it is an earlier one. Beside an
    earlier one, steps go on only until the next evaluation is due or no step is left. The time is in seconds since
    1970; None if there is none.

    Args:
        folder: The run folder; the run goes on.
        rows: The steps so far.
        evaluations: The evaluations that have ended.
    """
    last = rows[-1] if rows else {"step": 0}
    ended = {f"step-{each['step']:06d}" for each in evaluations if isinstance(each.get("step"), int)}
    newest = f"step-{last['step']:06d}"
    if newest in ended:
        return None
    answers = {path.parent.name: written_at(path) for path in (folder / "evaluations").glob("step-*/samples.jsonl")}
    if newest not in answers and _waits_for_earlier(folder, last):
        return max((time for name, time in answers.items() if name < newest and name not in ended), default=None)
    return answers.get(newest)


def _waits_for_earlier(folder: Path, last: Mapping[str, Any]) -> bool:
    """Return whether the run cannot go on after its last step before earlier evaluations have ended."""
    step: int = last["step"]
    is_last: bool = step >= last.get("num_steps", float("inf"))
    every: int = read_settings(folder).get("evaluation.every", 0)
    return is_last or (every > 0 and step % every == 0)
