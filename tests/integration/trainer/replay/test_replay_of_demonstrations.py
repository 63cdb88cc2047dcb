"""Replay of steps that learned demonstrations beside groups: from the recording alone, whatever became of the data."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, SetupError
from services.cli.replay.run import replay
from services.trainer.demonstrations.config import DemonstrationsConfig
from services.trainer.replay.replay import replay_step, start_of
from services.trainer.replay.run import RecordedRun
from tests.support.trainer.data.pictures import png
from tests.support.trainer.runs.mixed_run import train

NUM_STEPS = 3


@pytest.fixture(scope="module")
def run(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """Three steps with two demonstrations each, one of them with a picture; their file and picture are gone."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "a.png").write_bytes(png("blue", size=(64, 96)))
    rows: list[dict[str, Any]] = [
        {"prompt": "<image>What colour?", "completion": "blue", "images": ["a.png"]},
        {"prompt": "Say five.", "completion": "five", "images": []},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DemonstrationsConfig(
        path=str(folder / "rows.jsonl"), samples_per_step=2, coef=0.5, cache_dir=folder / "cache"
    )
    train(tiny_model_path, folder / "run", config, num_steps=NUM_STEPS, records=True)
    (folder / "a.png").unlink()
    (folder / "rows.jsonl").unlink()
    return RecordedRun(folder / "run")


@pytest.mark.parametrize("step", range(1, NUM_STEPS + 1))
def test_a_step_with_demonstrations_is_reproduced_bit_for_bit(
    run: RecordedRun, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the model, from a checkpoint, and through a step between them: losses, metrics and weights."""
    assert replay(run.path, step=step, overrides=[], export=None) == 0
    said = capsys.readouterr().out
    assert "is reproduced bit for bit" in said
    assert "DIFFERS" not in said
    assert all(name in said for name in ("ce_loss", "demonstration_cross_entropy", "num_demonstration_tokens"))


def test_another_factor_shows_what_it_would_have_done(run: RecordedRun, tmp_path: Path) -> None:
    """The demonstrations stay the same, their part of the loss is in proportion, and the weights are others."""
    recording = run.recording(2, ["--demonstrations.coef=1.0"])
    start = start_of(run, 2, model_path=recording.settings.model.path, scratch=tmp_path)
    as_it_was = replay_step(start, recording, run.recording(2).settings)
    changed = replay_step(start, recording, recording.settings)
    assert changed.metrics["demonstration_cross_entropy"] == as_it_was.metrics["demonstration_cross_entropy"]
    assert changed.metrics["ce_loss"] == 2 * as_it_was.metrics["ce_loss"]
    assert changed.metrics["policy_loss"] == as_it_was.metrics["policy_loss"]
    assert changed.weights_after != as_it_was.weights_after


def test_one_file_has_the_demonstrations_too(run: RecordedRun, tmp_path: Path) -> None:
    """As a bug report needs it."""
    file = tmp_path / "step-3.tar"
    assert replay(run.path, step=3, overrides=[], export=file) == 0
    assert replay(file, step=None, overrides=[], export=None) == 0


def test_a_step_that_ended_before_its_demonstrations_is_replayed_without_them(
    run: RecordedRun, tiny_model_path: Path, tmp_path: Path
) -> None:
    """As far as it came. A factor for what it has not learned is refused, as on a run without the section."""
    path = Path(shutil.copytree(run.path, tmp_path / "run"))
    file = path / "groups" / "step-000001" / "step.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_demonstrations": 0}))
    ended = RecordedRun(path)
    start = start_of(ended, 1, model_path=tiny_model_path, scratch=tmp_path)
    metrics = replay_step(start, ended.recording(1), ended.recording(1).settings).metrics
    assert "ce_loss" not in metrics
    assert metrics["loss"] == pytest.approx(metrics["policy_loss"])
    train(tiny_model_path, tmp_path / "none", None, num_steps=1, records=True)
    none = RecordedRun(tmp_path / "none")
    assert not (none.groups / "step-000001" / "demonstrations.msgpack").exists()
    assert replay(none.path, step=1, overrides=[], export=None) == 0
    with pytest.raises(ConfigError, match=r"step 1 learned no demonstrations; leave out --demonstrations\.coef=2"):
        none.recording(1, ["--demonstrations.coef=2"])


def test_a_recording_without_its_demonstrations_is_damaged(
    run: RecordedRun, tiny_model_path: Path, tmp_path: Path
) -> None:
    """Said, not left out in silence."""
    config = DemonstrationsConfig.model_validate({"sources": {"a": {}}, "samples_per_step": 1})
    train(tiny_model_path, tmp_path / "run", config, num_steps=1, records=True)
    damaged = RecordedRun(tmp_path / "run")
    (damaged.groups / "step-000001" / "demonstrations.msgpack").unlink()
    with pytest.raises(SetupError, match=r"the recording .*step-000001 is incomplete or damaged"):
        damaged.recording(1)
