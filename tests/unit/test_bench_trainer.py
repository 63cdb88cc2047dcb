"""What `make bench-trainer` compares is the same step; the GPU's script is right where it can run."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu.bench_train_step import attention_table
from bench.trainer.step_process import SUBJECTS
from bench.trainer.workload import Workload, read_groups
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


def test_the_attention_that_a_gpu_is_measured_against_is_right() -> None:
    """On a CPU, where ours is known: every error is one of rounding."""
    rows = [line.split("|") for line in attention_table(torch.device("cpu")).splitlines()[2:]]
    assert len(rows) == 8
    assert all(float(row[3]) < 1e-4 for row in rows)
