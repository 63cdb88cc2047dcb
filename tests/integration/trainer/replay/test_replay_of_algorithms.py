"""Replay of steps whose algorithm reads more than groups: a reference policy, or a person's own functions."""

from pathlib import Path
from typing import Any

import pytest

from services.cli.replay.run import replay
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.plugin import load_function
from services.trainer.replay.replay import ReplayedStep, replay_step, start_of
from services.trainer.replay.run import RecordedRun
from tests.conftest import ROOT
from tests.support.trainer.runs.mixed_run import train

NUM_STEPS = 3
"""The last one follows a checkpoint, the second one does not."""


def recorded(model: Path, folder: Path, algorithm: dict[str, Any]) -> RecordedRun:
    """A run of this algorithm."""
    train(model, folder, None, num_steps=NUM_STEPS, records=True, algorithm=AlgorithmConfig.model_validate(algorithm))
    return RecordedRun(folder)


def assert_reproduced(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Each step, to the bit."""
    for step in range(1, NUM_STEPS + 1):
        assert replay(run.path, step=step, overrides=[], export=None) == 0
        assert "is reproduced bit for bit" in capsys.readouterr().out


def changed_by(run: RecordedRun, scratch: Path, override: str) -> tuple[ReplayedStep, ReplayedStep]:
    """The last step as it was, and with another setting."""
    recording, other = run.recording(NUM_STEPS), run.recording(NUM_STEPS, [override])
    start = start_of(run, NUM_STEPS, model_path=recording.settings.model.path, scratch=scratch)
    return replay_step(start, recording, recording.settings), replay_step(start, other, other.settings)


def test_steps_with_a_reference_that_follows_are_reproduced(
    tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference of a step is neither the model that the run began with nor the policy."""
    kl = {"kind": "k3", "coef": 0.5, "refresh": "ema", "refresh_every": 1, "ema_weight": 0.5}
    run = recorded(tiny_model_path, tmp_path / "run", {"kl": kl})
    assert_reproduced(run, capsys)
    before, after = changed_by(run, tmp_path, "--algorithm.kl.coef=1.0")
    assert before.metrics["kl_loss"] > 0
    assert after.metrics["kl_loss"] == pytest.approx(2 * before.metrics["kl_loss"], rel=1e-6)
    assert after.weights_after != before.weights_after


def test_steps_with_k1_in_the_reward_are_reproduced(
    tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Advantages of tokens, from the reference of the checkpoint."""
    algorithm = {"advantage": {"kind": "reinforce_pp"}, "kl": {"kind": "k1_in_reward", "coef": 0.5}}
    run = recorded(tiny_model_path, tmp_path / "run", algorithm)
    assert_reproduced(run, capsys)
    before, after = changed_by(run, tmp_path, "--algorithm.kl.coef=1.0")
    assert before.metrics["kl_reference"] == after.metrics["kl_reference"] != 0
    assert after.weights_after != before.weights_after


def test_steps_with_functions_of_a_persons_own_are_reproduced(
    tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advantage and trust region; the recording has their names and options."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "algorithm")
    load_function.cache_clear()
    algorithm = {
        "anchor": "rollout",
        "correction": {"kind": "none"},
        "advantage": {"kind": "custom", "function": "own_axes:opo"},
        "trust_region": {"kind": "custom", "function": "own_axes:gmpo", "options": {"low": 0.4, "high": 0.4}},
        "aggregation": {"kind": "sequence"},
    }
    run = recorded(tiny_model_path, tmp_path / "run", algorithm)
    assert_reproduced(run, capsys)
    before, after = changed_by(run, tmp_path, "--algorithm.trust_region.options.high=0.01")
    assert after.metrics["rejected_fraction_trust_region"] > before.metrics["rejected_fraction_trust_region"]
    assert after.weights_after != before.weights_after
