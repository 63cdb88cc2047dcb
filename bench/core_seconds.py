"""Processor time of a demo step: core-seconds by process, over the middle of one run.

    python bench/core_seconds.py --steps 60
    python bench/core_seconds.py --steps 60 -- --worker.concurrency=64

The steps before `--warm-up` and the end of the run are not counted. Processor time is meaningful on a busy machine too;
the seconds of a step are not.
"""

import argparse
import collections
import statistics
import sys
import tempfile
from pathlib import Path

import psutil

from bench.demo.penstock_run import follow, training
from bench.demo.processor_time import core_seconds
from bench.support.termination import exit_on_sigterm
from services.launch.metrics import StepRow

_TIMES = ("step_s", "train_s", "wait_s", "push_wait_s", "checkpoint_wait_s", "push_s", "prefill_ratio")


def main() -> int:
    """Run the demo once and print the table for docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of the run")
    parser.add_argument("--warm-up", type=int, default=10, help="steps at the beginning that are not counted")
    parser.add_argument("overrides", nargs="*", help="--section.key=value, after a --")
    arguments = parser.parse_args()
    if not 0 < arguments.warm_up < arguments.steps - 1:
        parser.error(f"--warm-up {arguments.warm_up} must be above 0 and leave two of the {arguments.steps} --steps")
    exit_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="core-seconds-") as scratch:
        folder = Path(scratch) / "run"
        readings: dict[int, collections.Counter[str]] = {}
        with training(folder, [f"--trainer.num_steps={arguments.steps}", *arguments.overrides]) as process:

            def read(row: StepRow) -> None:
                if row["step"] in (arguments.warm_up, arguments.steps - 1):
                    readings[row["step"]] = core_seconds(psutil.Process(process.pid))

            rows = follow(process, folder, read)
    num_counted = arguments.steps - 1 - arguments.warm_up
    used = readings[arguments.steps - 1]
    used.subtract(readings[arguments.warm_up])
    sys.stdout.write("| process | core-s per step |\n|---|---|\n")
    for kind, seconds in sorted(used.items(), key=lambda item: -item[1]):
        sys.stdout.write(f"| {kind} | {seconds / num_counted:.3f} |\n")
    sys.stdout.write(f"| all | {used.total() / num_counted:.3f} |\n\n")
    counted = rows[arguments.warm_up : -1]
    for key in _TIMES:
        values = [row[key] for row in counted]
        sys.stdout.write(f"{key}: median {statistics.median(values):.3f}, mean {statistics.mean(values):.3f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
