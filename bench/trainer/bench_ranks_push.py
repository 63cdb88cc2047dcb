"""Measures a push from a trainer of one rank, two and four, and the memory that it takes of each rank.

    python bench/trainer/bench_ranks_push.py [--gb 0.5] [--ranks 1 2 4] [--receivers 1 2] [--engines 1 2] [--rounds 5]

Each rank writes its rows of the weights into memory of rank 0, which sends that to receivers: simulated engines, which
are the engine's own receiver with tensors in memory instead of a model, as in `bench_push.py`, or one SGLang of as many
processes as `--engines` says. A rank has one thread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.bench_push import build_model
from bench.support.cores import StolenTime
from bench.support.termination import exit_on_sigterm

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Measure, and print the table for docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=0.5, help="size of the pushed weights, in 10^9 bytes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--receivers", type=int, nargs="*", default=[1, 2], help="simulated engines")
    parser.add_argument("--engines", type=int, nargs="*", default=[1, 2], help="processes of one SGLang")
    parser.add_argument("--rounds", type=int, default=5, help="measured after one that is not; the medians count")
    arguments = parser.parse_args()
    exit_on_sigterm()
    stolen = StolenTime()
    receivers = [f"--receivers={number}" for number in arguments.receivers]
    receivers += [f"--engine={number}" for number in arguments.engines]
    sys.stdout.write(
        "| ranks | receivers | GB | snapshot s | push s | memory of rank 0 before and at most, MiB | "
        "of another rank |\n|---|---|---|---|---|---|---|\n"
    )
    with tempfile.TemporaryDirectory(prefix="bench-ranks-push-") as name:
        model = Path(name) / "model"
        build_model(model, int(arguments.gb * 1e9))
        for ranks in arguments.ranks:
            for receiver in receivers:
                command = [sys.executable, "-W", "ignore", "-m", "bench.trainer.ranks_push_process", str(ranks)]
                command += [f"--model={model}", receiver, f"--rounds={arguments.rounds}"]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                found = json.loads(done.stdout.splitlines()[-1])
                take_s, push_s = (statistics.median(found[name]) for name in ("take_s", "push_s"))
                memory = [f"{before:,.0f}, {most:,.0f}" for before, most in found["mb"]]
                sys.stdout.write(
                    f"| {ranks} | {found['what']} | {found['num_bytes'] / 1e9:.2f} | {take_s:.2f} | {push_s:.2f} | "
                    f"{memory[0]} | {memory[1] if ranks > 1 else ''} |\n"
                )
                sys.stdout.flush()
    sys.stdout.write(f"\ntime that the host took from all cores: {stolen.share():.1%}\n")


if __name__ == "__main__":
    main()
