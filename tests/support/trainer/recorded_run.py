"""A short recorded run, and its steps computed again."""

import shutil
from pathlib import Path

from services.trainer.replay.comparison import Line, compare
from services.trainer.replay.replay import ReplayedStep, replay_step, start_of
from services.trainer.replay.run import RecordedRun
from tests.conftest import ROOT

MODEL = ROOT / "models" / "tiny-qwen3-vl"
RECORDED = ROOT / "tests" / "data" / "replay" / "tiny-cpu"
"""Three steps of recipes/tiny-cpu.toml; tools/record_replay.py made them."""

NUM_STEPS = 3


def copied(folder: Path) -> RecordedRun:
    """A copy of the recorded run in `folder`, to change."""
    return RecordedRun(Path(shutil.copytree(RECORDED, folder / "run")))


def replayed(run: RecordedRun, step: int, scratch: Path, *overrides: str) -> ReplayedStep:
    """The step, computed again."""
    start = start_of(run, step, model_path=MODEL, scratch=scratch)
    return replay_step(start, run.recording(step), run.recording(step, overrides).settings)


def lines_of(run: RecordedRun, step: int, scratch: Path) -> dict[str, Line]:
    """What `penstock replay` shows, by name."""
    inputs = run.recording(step).inputs
    return {line.name: line for line in compare(inputs, run.metrics(step), replayed(run, step, scratch))}
