"""Optimizer steps per second while an evaluation holds a replica out of pushes, beside the same run without one.

    python bench/bench_evaluation.py                               # 4 and 8 engines, in about 10 minutes
    python bench/bench_evaluation.py --replicas 8 --staleness 4 --seconds 20

Loop, bus, router and worker are the real ones; engines and optimizer step are simulated, as in bench_async.py. Both
runs have the same drawn durations and go on at the same time, so that other work on the machine affects both alike. The
evaluation plays the first weights and lasts longer than the measurement, so it overlaps every measured step. With the
smaller bound on staleness, training waits for the longest samples most of the time, and one engine less costs little;
with the larger one the engines are the limit.

Bar: with R engines, one of them held out, at least (R - 1) / R - 3% of the steps per second. The exit code is 1 if it
fails.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.async_loop.measured_loop import LoopError, Measured, run_loop
from bench.async_loop.perfect_loop import step_ends
from bench.async_loop.workload import Scenario, scenario
from bench.support.new_folder import new_folder

MARGIN = 0.03
_SLOTS = 8
_NUM_WARMUP = 5
"""Steps after which the held-out engine has finished its training samples."""
_SPARE = 4
"""The evaluation is sized to take this many times the measured duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Steps per second with R engines."""

    replicas: int
    max_staleness: int
    num_steps: int
    alone: float
    beside: float
    best_alone: float
    """Steps per second of R engines if the control plane takes no time."""
    best_beside: float
    """The same for R - 1 engines."""
    stale_groups: int

    @property
    def share(self) -> float:
        """The share of steps per second that is left beside the evaluation."""
        return self.beside / self.alone

    @property
    def least(self) -> float:
        """The minimum share: the bar."""
        return (self.replicas - 1) / self.replicas - MARGIN


async def measure(pool: Scenario, folder: Path, *, max_staleness: int, seconds: float) -> Result:
    """Run the loop for about `seconds` without an evaluation, and at the same time for the same steps beside one.

    Raises:
        LoopError: a run failed, or the evaluation ended before the last step.
    """
    left = Scenario(
        replicas=pool.replicas - 1,
        slots_per_replica=pool.slots_per_replica,
        groups_per_step=pool.groups_per_step,
        workload=pool.workload,
    )
    step_s = pool.rollout_s(range(1024)) * pool.groups_per_step / 1024
    num_steps = _NUM_WARMUP + max(8, round(seconds / step_s))
    num_rows = round(_SPARE * num_steps * pool.groups_per_step / pool.replicas)
    bests = [step_ends(each, max_staleness=max_staleness, num_steps=num_steps) for each in (pool, left)]

    async def run(name: str, num_evaluated: int) -> Measured:
        return await run_loop(
            pool,
            folder / name,
            max_staleness=max_staleness,
            num_warmup=_NUM_WARMUP,
            num_steps=num_steps,
            timeout_s=120.0 + 8 * bests[1][-1],
            num_evaluated=num_evaluated,
        )

    runs = await asyncio.gather(run("alone", 0), run("beside", num_rows))
    if (folder / "beside" / "run" / "evaluations.jsonl").exists():
        raise LoopError("the evaluation ended before the last step; raise _SPARE")
    if not (folder / "beside" / "run" / "evaluations" / "step-000000" / "weights").exists():
        raise LoopError("no replica was held out")

    def rate(ends: list[float]) -> float:
        return (num_steps - _NUM_WARMUP) / (ends[num_steps - 1] - ends[_NUM_WARMUP - 1])

    return Result(
        replicas=pool.replicas,
        max_staleness=max_staleness,
        num_steps=num_steps - _NUM_WARMUP,
        alone=rate(runs[0].ends),
        beside=rate(runs[1].ends),
        best_alone=rate(bests[0]),
        best_beside=rate(bests[1]),
        stale_groups=sum(run.stale_groups for run in runs),
    )


def _report(result: Result) -> None:
    cells = (
        *(result.replicas, result.max_staleness, result.num_steps, f"{result.alone:.4f}", f"{result.beside:.4f}"),
        *(f"{result.share:.1%}", f"{result.least:.1%}", f"{result.best_beside / result.best_alone:.1%}"),
        result.stale_groups,
        "holds" if result.share >= result.least else "FAILS",
    )
    sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
    sys.stdout.flush()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 8], help="2 or more")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 4], help="values of max_staleness")
    parser.add_argument("--seconds", type=float, default=30.0, help="measured in each run")
    parser.add_argument("--sample-s", type=float, default=4.0, help="mean seconds of a sample")
    parser.add_argument("--train-share", type=float, default=0.5, help="optimizer step, as a share of R/n")
    parser.add_argument("--seed", type=int, default=0, help="of the durations")
    parser.add_argument("--folder", type=new_folder, help="new folder for the runs, their logs and metrics")
    return parser.parse_args()


async def main(options: argparse.Namespace) -> int:
    """Return 0 if the bar holds for every pool."""
    results = []
    rates = ("steps/s, alone", "steps/s, beside an evaluation", "share", "asked", "share without a control plane")
    headings = ("replicas", "max_staleness", "steps", *rates, "stale groups", "")
    sys.stdout.write(f"load of the machine before: {os.getloadavg()[0]:.1f}\n\n| {' | '.join(headings)} |\n")
    sys.stdout.write(f"|{'---|' * len(headings)}\n")
    with tempfile.TemporaryDirectory(prefix="evaluation-", ignore_cleanup_errors=True) as scratch:
        for replicas in options.replicas:
            pool = scenario(
                replicas,
                slots=_SLOTS,
                sample_s=options.sample_s,
                train_share=options.train_share,
                seed=options.seed,
            )
            for max_staleness in options.staleness:
                folder = (options.folder or Path(scratch)) / f"{replicas}-replicas-staleness-{max_staleness}"
                try:
                    result = await measure(pool, folder, max_staleness=max_staleness, seconds=options.seconds)
                except LoopError as error:
                    sys.stderr.write(f"{replicas} replicas, max_staleness = {max_staleness}: {error}\n")
                    return 1
                results.append(result)
                _report(result)
    sys.stdout.write(f"\nload of the machine after: {os.getloadavg()[0]:.1f}\n")
    return 0 if all(each.share >= each.least and not each.stale_groups for each in results) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(_parse())))
