"""Runs a demo recipe with several seeds and prints a table: does GRPO learn, and what does a step cost?

    python bench/demo/bench_demo.py --seeds 0 1 2
    python bench/demo/bench_demo.py --recipe tiny-multi-turn

Every run is a whole `penstock train` with all its real processes, one after the other.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.demo.penstock_run import running
from bench.support.new_folder import new_folder
from bench.support.termination import exit_on_sigterm

COLUMNS = (
    "seed", "steps", "first 10", "last 10", "gain", "wall s", "s/step", "train s", "wait s", "push s", "pause s",
    "samples/s", "max staleness", "max dlogp, same version", "stale", "failed", "trained twice",
)  # fmt: skip


def main() -> int:
    """Return 0 if every run ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", default="tiny-cpu", help="its name, or a file; default: tiny-cpu")
    parser.add_argument("--runs", type=new_folder, help="new folder for the runs; default: one that is removed")
    parser.add_argument("overrides", nargs="*", help="--section.key=value, after a --")
    arguments = parser.parse_args()
    exit_on_sigterm()
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    with tempfile.TemporaryDirectory() as scratch:
        runs = arguments.runs or Path(scratch)
        for seed in arguments.seeds:
            started = time.monotonic()
            overrides = [f"--run.seed={seed}", f"--run.dir={runs / f'seed-{seed}'}", *arguments.overrides]
            with running("train", arguments.recipe, *overrides) as process:
                if code := process.wait():
                    return code
            (metrics,) = (runs / f"seed-{seed}").glob("*/metrics.jsonl")
            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
            values = describe(seed, rows, time.monotonic() - started)
            sys.stdout.write(f"| {' | '.join(values)} |\n")
            sys.stdout.flush()
    return 0


def describe(seed: int, rows: list[dict[str, Any]], wall_s: float) -> list[str]:
    """Return one line of the table; times are medians over steps."""
    rewards = [row["reward_mean"] for row in rows]
    first, last = statistics.mean(rewards[:10]), statistics.mean(rewards[-10:])
    trained = [index for row in rows for index in row["groups"]]
    same_version = [row["dlogp_max_current"] for row in rows if "dlogp_max_current" in row]
    step_s = statistics.median(row["step_s"] for row in rows)
    return [
        str(seed),
        str(len(rows)),
        f"{first:.3f}",
        f"{last:.3f}",
        f"{last - first:+.3f}",
        f"{wall_s:.0f}",
        f"{step_s:.2f}",
        *(
            f"{statistics.median(row[key] for row in rows):.2f}"
            for key in ("train_s", "wait_s", "push_s", "push_pause_s")
        ),
        f"{statistics.median(row['num_samples'] for row in rows) / step_s:.0f}",
        str(max(row["staleness_max"] for row in rows)),
        f"{max(same_version):.1e}" if same_version else "-",
        str(rows[-1]["num_stale_groups"]),
        str(rows[-1]["num_failed_groups"]),
        str(len(trained) - len(set(trained))),
    ]


if __name__ == "__main__":
    sys.exit(main())
