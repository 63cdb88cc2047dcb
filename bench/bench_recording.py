"""What it costs a step to record everything: all episodes with every token, and the spans of all processes.

    python bench/bench_recording.py                            # 4 rounds of two demo runs of 40 steps, in 15 minutes
    python bench/bench_recording.py --rounds 1 --steps 14      # a taste

Each round runs the demo recipe twice at once with the same seed, with `episodes.keep = "all"` and spans, and with
neither: one after the other, the runs would differ by more than recording costs, because the machine does. Compared
are, round by round, the medians of the steps' seconds, and the processor time of all processes in a step.
"""

import argparse
import collections
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.demo.penstock_run import follow, training
from bench.demo.processor_time import core_seconds
from bench.support.termination import exit_on_sigterm
from services.launch.metrics import StepRow

_WAYS = {
    "recorded": ("--episodes.keep=all",),
    "not recorded": ("--episodes.keep=off", "--trace.max_gib=0"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the demo, over the steps that count."""

    step_s: float
    """Median."""
    core_s: float
    """Processor time of all processes in a step, on average."""
    kinds: collections.Counter[str]
    """The same by the kind of process."""
    recorded_bytes: float
    """Bytes in `episodes` and `trace` for a step."""


def measure(process: subprocess.Popen[bytes], folder: Path, *, steps: int, warm_up: int) -> Run:
    """Follow a run to its end; the first `warm_up` steps do not count."""
    readings: dict[int, collections.Counter[str]] = {}

    def read(row: StepRow) -> None:
        if row["step"] in (warm_up, steps - 1):
            readings[row["step"]] = core_seconds(psutil.Process(process.pid))

    rows = follow(process, folder, read)
    used = readings[steps - 1]
    used.subtract(readings[warm_up])
    num_counted = steps - 1 - warm_up
    kept = [path for name in ("episodes", "trace") for path in (folder / name).rglob("*") if path.is_file()]
    return Run(
        step_s=statistics.median(row["step_s"] for row in rows[warm_up:-1]),
        core_s=used.total() / num_counted,
        kinds=collections.Counter({kind: seconds / num_counted for kind, seconds in used.items()}),
        recorded_bytes=sum(path.stat().st_size for path in kept) / steps,
    )


def main() -> int:
    """Print one line for each run, and the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--warm-up", type=int, default=8, help="steps at the beginning of a run that are not counted")
    parser.add_argument("overrides", nargs="*", help="--section.key=value for all runs, after a --")
    arguments = parser.parse_args()
    if not 0 < arguments.warm_up < arguments.steps - 2:
        parser.error(f"--warm-up {arguments.warm_up} must be above 0 and leave two of the {arguments.steps} --steps")
    exit_on_sigterm()
    found: dict[str, list[Run]] = {way: [] for way in _WAYS}
    sys.stdout.write(
        "| round | s/step, recorded | not recorded | core-s/step, recorded | not recorded | recorded, kB/step |\n"
        "|---|---|---|---|---|---|\n"
    )
    with (
        tempfile.TemporaryDirectory(prefix="recording-", ignore_cleanup_errors=True) as scratch,
        ThreadPoolExecutor(len(_WAYS)) as threads,
    ):
        for number in range(arguments.rounds):
            with ExitStack() as runs:
                measured: dict[str, Future[Run]] = {}
                for way, settings in _WAYS.items():
                    folder = Path(scratch) / f"{number}-{way.replace(' ', '-')}"
                    both = [f"--run.seed={number}", f"--trainer.num_steps={arguments.steps}"]
                    process = runs.enter_context(training(folder, [*both, *settings, *arguments.overrides]))
                    measured[way] = threads.submit(
                        measure, process, folder, steps=arguments.steps, warm_up=arguments.warm_up
                    )
                for way in _WAYS:
                    found[way].append(measured[way].result())
            on, off = (found[way][-1] for way in _WAYS)
            sys.stdout.write(
                f"| {number} | {on.step_s:.3f} | {off.step_s:.3f} | {on.core_s:.3f} | {off.core_s:.3f} "
                f"| {on.recorded_bytes / 1000:.0f} |\n"
            )
            sys.stdout.flush()
    _compare(found)
    return 0


def _compare(found: dict[str, list[Run]]) -> None:
    def ratios(value: str) -> list[float]:
        pairs = zip(found["recorded"], found["not recorded"], strict=True)
        return [getattr(on, value) / getattr(off, value) - 1 for on, off in pairs]

    for value, name in (("step_s", "seconds of a step"), ("core_s", "processor time of a step")):
        each = ratios(value)
        sys.stdout.write(
            f"\nrecorded / not recorded, {name}: {statistics.mean(each):+.1%} on average, from {min(each):+.1%} to "
            f"{max(each):+.1%}\n"
        )
    kinds = sorted({kind for run in found["recorded"] for kind in run.kinds})
    sys.stdout.write("\n| process | recorded, core-s/step | not recorded |\n|---|---|---|\n")
    for kind in kinds:
        on, off = (statistics.mean(run.kinds[kind] for run in found[way]) for way in ("recorded", "not recorded"))
        sys.stdout.write(f"| {kind} | {on:.3f} | {off:.3f} |\n")


if __name__ == "__main__":
    sys.exit(main())
