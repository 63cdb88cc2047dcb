"""The optimizer step of `bench_trainer.py` on one rank and on two, each with one thread on one core.

    python bench/trainer/bench_ranks.py

Two ranks on two cores should take half the time of one on one core; the difference is communication, waiting for each
other, and the work that every rank repeats.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.support.termination import exit_on_sigterm
from bench.trainer.workload import RESPONSES, write_model, write_workload

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Measure, print the table for docs/benchmarks.md, and return 1 if the gradients differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=3, help="measured after one that is not; the median counts")
    arguments = parser.parse_args()
    exit_on_sigterm()
    sys.stdout.write(
        "| ranks | s/step | times one rank's, of as many as there are ranks | share in collectives | "
        "memory of each rank at most, MiB |\n|---|---|---|---|---|\n"
    )
    norms, first = [], None
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as name:
        folder = Path(name)
        write_model(folder / "model")
        workload = write_workload(folder, num_groups=len(RESPONSES))
        for ranks in arguments.ranks:
            command = [sys.executable, "-m", "bench.trainer.ranks_process", str(ranks), f"--steps={arguments.steps}"]
            command += [f"--model={folder / 'model'}", f"--workload={workload}"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            seconds = statistics.median(found["seconds"])
            first = first or seconds
            speedup = first / seconds
            memory = ", ".join(f"{mb:,.0f}" for mb in found["mb"])
            share = f"{found['communication_share']:.0%}"
            norms.append(found["grad_norm"])
            sys.stdout.write(f"| {ranks} | {seconds:.2f} | {speedup:.2f} of {ranks} | {share} | {memory} |\n")
            sys.stdout.flush()
    if max(norms) > min(norms) * (1 + 1e-4):
        sys.stdout.write(f"\nthe gradients differ: {norms}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
