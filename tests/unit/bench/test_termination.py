"""A benchmark that is told to end leaves no process behind."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import is_alive
from tests.support.waiting import HANG_S, wait_until

ROOT = Path(__file__).resolve().parents[3]

_STAND_IN = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()}\\n")
time.sleep(60)
"""
"""Runs in place of `penstock`."""

_MAIN = "from {0} import {1}; {1}.main()"
_CHAOS = """
import time
from bench import chaos
chaos.started = lambda *_, **__: penstock_run.running()
chaos.break_at_random = lambda *_, **__: time.sleep(60)
chaos.main()
"""
_ROUTER = """
import asyncio
from bench.support.router_subjects import process

async def main():
    async with process(*penstock_run.PENSTOCK):
        await asyncio.sleep(60)

asyncio.run(main())
"""
_TRAINER = """
from bench.trainer import bench_trainer
bench_trainer.command = lambda *_: penstock_run.PENSTOCK
bench_trainer.write_model = bench_trainer.write_workload = lambda *_, **__: None
bench_trainer.main()
"""


@pytest.mark.parametrize(
    "program",
    [
        _MAIN.format("bench.demo", "bench_demo"),
        _MAIN.format("bench.demo", "bench_zoom"),
        _MAIN.format("bench", "core_seconds"),
        _CHAOS,
        _ROUTER,
        _TRAINER,
    ],
    ids=["bench_demo", "bench_zoom", "core_seconds", "chaos", "bench_router", "bench_trainer"],
)
def test_what_a_benchmark_started_ends_with_it(program: str, tmp_path: Path) -> None:
    """A run of `penstock train` in order, so that its own processes end too; others at once."""
    file = tmp_path / "pid"
    stand_in = (sys.executable, "-c", _STAND_IN, str(file))
    start = f"from bench.demo import penstock_run\npenstock_run.PENSTOCK = {stand_in!r}\n"
    with subprocess.Popen([sys.executable, "-c", start + program], cwd=ROOT, stdout=subprocess.DEVNULL) as benchmark:
        try:
            wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
            pid = int(file.read_text())
            benchmark.terminate()
            benchmark.wait(HANG_S)
            wait_until(lambda: not is_alive(pid), timeout_s=10.0)
            assert not is_alive(pid)
        finally:
            benchmark.kill()
