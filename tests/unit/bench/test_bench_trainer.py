"""What `make bench-trainer` compares is the same step; the GPU's script is right where it can run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.demo.penstock_run import RECIPE
from bench.demo.task import write_task
from bench.gpu.bench_train_step import attention_table
from bench.trainer import bench_trainer
from bench.trainer.bench_trainer import Measured
from bench.trainer.step_process import SUBJECTS
from bench.trainer.workload import Workload, read_groups
from penstock import config as configuration
from services.recipe import Recipe
from services.trainer.data.dataset import open_dataset
from tests.support.trainer.groups import picture


def test_subjects_take_the_same_step(tiny_model_path: Path, tmp_path: Path) -> None:
    """Group rows, packed rows and the padded reference have the same gradient."""
    rng = np.random.default_rng(0)
    (tmp_path / "image.png").write_bytes(picture(0))
    responses = [rng.integers(0, 256, length).tolist() for length in (3, 9, 20)]
    workload = Workload(
        text="Find x.", images=[str(tmp_path / "image.png")], responses=[responses], rewards=[1.0, 0.0, 0.0]
    )
    groups = read_groups(tiny_model_path, workload)
    norms = {subject: step(tiny_model_path, groups)() for subject, step in SUBJECTS.items()}
    assert norms == dict.fromkeys(SUBJECTS, pytest.approx(norms["padded"], rel=1e-5))


@pytest.mark.parametrize(
    ("subjects", "measured", "last_cell", "code"),
    [
        (["padded"], ["padded"], "", 0),
        (["padded", "group_rows"], ["group_rows", "padded"], "2.50 (bar 2)", 0),
        (["trl", "group_rows"], ["group_rows", "trl"], "2.50 (bar 3)", 1),
    ],
)
def test_bars_are_of_group_rows(
    subjects: list[str],
    measured: list[str],
    last_cell: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are measured first, whatever the order asked for; without them there is no comparison and no missed bar."""
    order: list[str] = []

    def measure(subject: str, *_: object) -> Measured:
        order.append(subject)
        seconds = 2.0 if subject == "group_rows" else 5.0
        return Measured(step_s=seconds, core_s=seconds, peak_mb=100.0, grad_norm=1.0)

    monkeypatch.setattr("sys.argv", ["bench_trainer.py", "--subjects", *subjects])
    monkeypatch.setattr(bench_trainer, "measure", measure)
    monkeypatch.setattr(bench_trainer, "write_model", lambda _: None)
    monkeypatch.setattr(bench_trainer, "write_workload", lambda *_, **__: None)
    assert bench_trainer.main() == code
    assert order == measured
    [*_, last_row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert last_row.split("|")[-2].strip() == last_cell


def test_the_table_names_trls_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that the measured process reports."""
    interpreter = tmp_path / "python"
    found = {"seconds": [2.0], "core_seconds": [3.0], "peak_mb": 100.0, "version": "9.8.7"}
    interpreter.write_text(f"#!/bin/sh\necho '{json.dumps(found)}'\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr("sys.argv", ["bench_trainer.py", "--subjects", "trl", "--trl", str(interpreter)])
    monkeypatch.setattr(bench_trainer, "write_model", lambda _: None)
    monkeypatch.setattr(bench_trainer, "write_workload", lambda *_, **__: None)
    assert bench_trainer.main() == 0
    assert "\n| TRL GRPOTrainer 9.8.7 | 2.00 | 3.00 |" in capsys.readouterr().out


def test_the_attention_that_a_gpu_is_measured_against_is_right() -> None:
    """On a CPU, where ours is known: every error is one of rounding."""
    rows = [line.split("|") for line in attention_table(torch.device("cpu")).splitlines()[2:]]
    assert len(rows) == 8
    assert all(float(row[3]) < 1e-4 for row in rows)


def test_trl_gets_the_demos_own_problems(tmp_path: Path) -> None:
    """In the run's order: text without a mark for the picture, the picture, the answer, and batch and sampling."""
    recipe = configuration.load(Recipe, [RECIPE], ["--trainer.num_steps=2", "--run.seed=3"])
    task = json.loads(write_task(tmp_path, recipe, target=0.8, window=5).read_text())
    dataset = open_dataset(recipe.data, seed=3)
    assert len(task["rows"]) == 2 * task["groups_per_step"] == 64
    for position, row in enumerate(task["rows"]):
        example = dataset[position]
        assert (tmp_path / row["image"]).read_bytes() == example.images[0]
        assert row["gold"] == example.golds[0]
        assert row["text"].startswith("Find the ")
    assert task["max_new_tokens"] == recipe.sampling.max_new_tokens == 12
    assert task["samples_per_group"] == recipe.trainer.samples_per_group
