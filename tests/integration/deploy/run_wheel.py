"""A training run from the wheel in an environment that has nothing else: `make test-wheel`.

The packages come from the index, several GB; the run takes two steps with real engines.
"""

import json
import venv
from pathlib import Path

import pytest

from tests.support.wheel import build_wheel, run_apart

INSTALL_TIMEOUT_S = 3000.0
RUN_TIMEOUT_S = 1200.0
NUM_STEPS = 2

pytestmark = pytest.mark.timeout(INSTALL_TIMEOUT_S + RUN_TIMEOUT_S)


def test_a_run_is_trained_to_its_end(tmp_path: Path) -> None:
    """A copy of the shipped recipe, with the shipped model; its checkpoint is a model that can be trained on."""
    (tmp_path / "dist").mkdir()
    wheel = build_wheel(tmp_path / "dist")
    venv.create(tmp_path / "venv", with_pip=True)
    commands = tmp_path / "venv/bin"
    work = tmp_path / "work"
    work.mkdir()
    run_apart(commands / "pip", "install", "--quiet", f"{wheel}[all]", cwd=work, timeout_s=INSTALL_TIMEOUT_S)
    run_apart(commands / "penstock", "init", "tiny-cpu", cwd=work)
    fewer = [f"--trainer.num_steps={NUM_STEPS}", "--evaluation.at_start=false", "--evaluation.at_end=false"]
    run_apart(commands / "penstock", "train", "tiny-cpu.toml", *fewer, cwd=work, timeout_s=RUN_TIMEOUT_S)
    (folder,) = (work / "runs").iterdir()
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in steps] == list(range(1, NUM_STEPS + 1))
    assert all(each["grad_norm"] > 0 for each in steps)
    (model,) = folder.glob(f"checkpoints/step-{NUM_STEPS:06d}/model")
    plan = run_apart(commands / "penstock", "train", "tiny-cpu.toml", f"--model.path={model}", "--dry-run", cwd=work)
    assert "rollout-1" in plan
