"""What starts scripts finds them, and goes on after one that fails."""

import shutil
import subprocess
from pathlib import Path

from bench.scale.churn import ENGINES_SCRIPT
from bench.support.router_subjects import ENGINE_SCRIPT

ROOT = Path(__file__).resolve().parents[3]


def test_the_engines_of_bench_router_and_churn_are_there() -> None:
    """Otherwise both wait for engines that never start."""
    assert ENGINE_SCRIPT.is_file()
    assert ENGINES_SCRIPT.is_file()


def test_make_bench_runs_all_benchmarks_and_names_those_that_failed(tmp_path: Path) -> None:
    """A missed bar does not end it, and it leaves out what needs a GPU, or to be told URLs."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("bench_first", "gpu/bench_gpu", "router/bench_http", "router/bench_last"):
        file = tmp_path / "bench" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "ran $*"\ncase "$*" in *first*) exit 1;; esac\n')
    python.chmod(0o755)
    command = ["make", "--silent", "--directory", str(tmp_path), "--assume-old=setup", "BIN=bin", "bench"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    ran = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("ran ")]
    assert ran == ["bench/bench_first.py", "bench/router/bench_last.py"]
    assert done.stdout.splitlines()[-1] == "failed: bench/bench_first.py"
    assert done.returncode != 0
