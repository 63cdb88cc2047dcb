"""What `make bench-trainer` compares is the same step; the GPU's script is right where it can run."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.demo.penstock_run import RECIPE
from bench.demo.task import write_task
from bench.gpu.bench_train_step import attention_table
from bench.trainer import bench_trainer
from bench.trainer.step_process import SUBJECTS
from bench.trainer.workload import Workload, read_groups
from penstock import config as configuration
from services.recipe import Recipe
from services.trainer.data.dataset import open_dataset
from tests.support.processes import is_alive
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


_SUBJECT = """
import json, os, sys
from bench.trainer.turns import Turns
turns = Turns()
print("a library's line")
for seconds in json.loads(sys.argv[2]):
    turns.begin()
    with open("LOG", "a") as log:
        log.write(f"{sys.argv[1]} {os.getpid()}\\n")
    turns.end(seconds=seconds, core_seconds=1.5 * seconds, peak_mb=100.0, grad_norm=1.0)
sys.exit("out of memory")
"""
"""Stands in for a subject's process; the first of its seconds is the warm-up's."""


class StandIns:
    """Subjects that take as long as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
        self._monkeypatch = monkeypatch
        self._log = log

    def run(self, seconds: dict[str, list[float]], *, rounds: int) -> int:
        """Run the benchmark with the subjects in this order, and return its exit code."""
        program = _SUBJECT.replace("LOG", str(self._log))
        self._monkeypatch.setattr("sys.argv", ["bench_trainer.py", f"--rounds={rounds}", "--subjects", *seconds])
        self._monkeypatch.setattr(
            bench_trainer,
            "command",
            lambda subject, *_: [sys.executable, "-c", program, subject, json.dumps(seconds[subject])],
        )
        self._monkeypatch.setattr(bench_trainer, "write_model", lambda _: None)
        self._monkeypatch.setattr(bench_trainer, "write_workload", lambda *_, **__: None)
        return bench_trainer.main()

    def steps(self) -> list[tuple[str, int]]:
        """Return the subject and the process of each step, in order."""
        lines = (line.split() for line in self._log.read_text().splitlines())
        return [(subject, int(pid)) for subject, pid in lines]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIns:
    return StandIns(monkeypatch, tmp_path / "steps")


def last_row(out: str) -> list[str]:
    """Return the cells of a table's last row."""
    [*_, row] = [line for line in out.splitlines() if line.startswith("|")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_subjects_take_their_steps_in_turn(stand_ins: StandIns) -> None:
    """Every subject takes one step to warm up and one in each round, always in the same process."""
    assert stand_ins.run({"trl": [9.0] * 5, "group_rows": [1.0] * 5, "padded": [9.0] * 5}, rounds=4) == 0
    steps = stand_ins.steps()
    subjects = [subject for subject, _ in steps]
    assert subjects[:3] == ["group_rows", "padded", "trl"]
    rounds = [subjects[start : start + 3] for start in range(3, len(steps), 3)]
    assert [sorted(each) for each in rounds] == [["group_rows", "padded", "trl"]] * 4
    assert len(set(steps)) == 3
    assert not any(is_alive(pid) for _, pid in steps)


@pytest.mark.parametrize(
    ("subject", "seconds", "last_cell", "code"),
    [
        ("packed", [9.0, 2.2, 6.0, 8.8], "2.20 (2.20 to 3.00)", 0),
        ("padded", [9.0, 2.2, 6.0, 8.8], "2.20 (2.20 to 3.00), bar 2", 0),
        ("padded", [9.0, 1.8, 6.0, 7.2], "1.80 (1.80 to 3.00), bar 2", 1),
        ("trl", [9.0, 3.2, 4.0, 12.8], "3.20 (2.00 to 3.20), bar 3", 0),
    ],
)
def test_a_ratio_is_of_two_steps_of_one_round(
    subject: str,
    seconds: list[float],
    last_cell: str,
    code: int,
    stand_ins: StandIns,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """While the machine slows down, the medians of all steps tell another one; the bar is of the median ratio."""
    assert stand_ins.run({subject: seconds, "group_rows": [9.0, 1.0, 2.0, 4.0]}, rounds=3) == code
    out = capsys.readouterr().out
    _, step_s, core_s, _, _, faster = last_row(out)
    median_s = sorted(seconds[1:])[1]
    assert (step_s, core_s, faster) == (f"{median_s:.2f}", f"{1.5 * median_s:.2f}", last_cell)
    assert (f"below their bar: {subject}" in out) == bool(code)


def test_without_group_rows_there_is_no_bar(stand_ins: StandIns, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is compared then."""
    assert stand_ins.run({"padded": [9.0, 1.0]}, rounds=1) == 0
    assert last_row(capsys.readouterr().out)[-1] == ""


def test_a_subject_that_fails_ends_the_benchmark(stand_ins: StandIns) -> None:
    """It tells the end of the process's standard error, and leaves no process."""
    with pytest.raises(SystemExit) as ended:
        stand_ins.run({"group_rows": [1.0] * 9, "padded": [9.0, 2.0, 2.0]}, rounds=8)
    assert ended.value.code == "padded ended with 1:\na library's line\nout of memory\n"
    steps = stand_ins.steps()
    assert [subject for subject, _ in steps].count("padded") == 3
    assert not any(is_alive(pid) for _, pid in steps)


def test_the_table_names_trls_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that the measured process reports."""
    interpreter = tmp_path / "python"
    answer = {"seconds": 2.0, "core_seconds": 3.0, "peak_mb": 100.0, "version": "9.8.7"}
    interpreter.write_text(f"#!/bin/sh\nwhile read -r _; do echo '{json.dumps(answer)}'; done\n")
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
