"""Tells from the files of a training run whether everything that its recipe asks for is done."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from services.view.run_reader import read_settings

_MARK: Final = "metrics-running"
"""File of a trainer that works, or has died: one that ends in order has saved its last step, and removes the file."""


def is_complete(folder: Path, rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a run is complete: its last step is trained and saved, and no evaluation is left to play.

    Args:
        folder: The run folder; no trainer works in it.
        rows: The steps so far.
        evaluations: The evaluations that have ended.
    """
    step, settings = rows[-1]["step"] if rows else 0, read_settings(folder)
    num_steps = settings.get("trainer.num_steps", float("inf"))
    if step < num_steps or (folder / _MARK).exists():
        return False
    every = settings.get("evaluation.every", 0)
    is_due = (settings.get("evaluation.at_end", False) and step == num_steps) or (every > 0 and step % every == 0)
    ended = {row.get("step") for row in evaluations}
    return (not is_due or step in ended) and not _has_interrupted(folder, ended)


def _has_interrupted(folder: Path, ended: set[Any]) -> bool:
    """Return whether an evaluation kept its weights, with which a trainer that is started again goes on."""
    names = {f"step-{step:06d}" for step in ended if isinstance(step, int)}
    return any(path.parent.name not in names for path in (folder / "evaluations").glob("step-*/weights"))
