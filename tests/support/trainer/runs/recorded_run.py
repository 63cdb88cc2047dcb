"""A short recorded run, and its steps computed again."""

import functools
import json
import shutil
import tempfile
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
    """A copy of the recorded run in `folder`, to change, as this machine would have recorded it: with its digests."""
    run = RecordedRun(Path(shutil.copytree(RECORDED, folder / "run")))
    for step, weights in _digests_here().items():
        file = run.groups / f"step-{step:06d}" / "step.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"weights": weights}))
    return run


@functools.cache
def _digests_here() -> dict[int, str]:
    """The weights before each step. Another processor rounds in another way than that of the recording."""
    with tempfile.TemporaryDirectory() as scratch:
        start = start_of(RecordedRun(RECORDED), 2, model_path=MODEL, scratch=Path(scratch))
        recording = RecordedRun(RECORDED).recording(2)
        second = replay_step(start, recording, recording.settings)
    first = RecordedRun(RECORDED).recording(1).inputs.weights
    return {1: first, 2: second.weights_before, 3: second.weights_after}


def replayed(run: RecordedRun, step: int, scratch: Path, *overrides: str) -> ReplayedStep:
    """The step, computed again."""
    start = start_of(run, step, model_path=MODEL, scratch=scratch)
    return replay_step(start, run.recording(step), run.recording(step, overrides).settings)


def lines_of(run: RecordedRun, step: int, scratch: Path) -> dict[str, Line]:
    """What `penstock replay` shows, by name."""
    inputs = run.recording(step).inputs
    return {line.name: line for line in compare(inputs, run.metrics(step), replayed(run, step, scratch))}
