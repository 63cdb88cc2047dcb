"""Steps per second of the asynchronous loop under each bound on staleness, beside the best that the bound allows.

    python bench/async_loop/bench_async.py                                 # 8, 64 and 512 engines, in about 70 minutes
    python bench/async_loop/bench_async.py --sample-s 1.5 --seconds 25     # steps of 1.5 to 9 s, in about 20 minutes
    python bench/async_loop/bench_async.py --replicas 8 --staleness 1 --sample-s 1.5 --seconds 20    # a taste
    python bench/async_loop/bench_async.py --replicas 8 --staleness 4 --seeds 0 1 2 3    # one row, four times

Loop, bus, router and worker are the real ones, each a process; the engines and the optimizer step are simulated, with
durations from long-tailed laws (bench/async_loop/workload.py). A sample takes 20 s in the mean, as 1,000 tokens do at
50 a second. R/n is the time in which all slots together finish a batch, U that of an optimizer step. The comparison is
over the same steps and the same drawn durations:

- *ideal*: 1 / max(R/n, U), with slots or trainer never idle; no bound on staleness allows exactly that;
- *best*: what Penstock would reach if its control plane took no time (bench/async_loop/perfect_loop.py), and how much
  of that is left if the trainer began only with the whole batch (*not streamed*), and with the real router's placement
  and the real trainer's chunks (*routed*, bench/async_loop/routed_loop.py), where still nothing else takes time: mean
  and standard deviation of runs in which each sample is a little longer or shorter, which says how much of a difference
  is chance;
- loops that wait for the whole batch, simulated without any cost (bench/async_loop/peer_loops.py).

A row counts few steps, and which samples they have differs between the loops, so one run can be 3% above or below what
many give. With several `--seeds` each row runs once for each, with other draws, and the mean is held against the bar.

Bars: at least 95% of the best; the control plane (all processes but the engines) below half a core. The exit code is 1
if one fails.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.async_loop.measured_loop import ENGINES, LoopError, Measured, run_loop
from bench.async_loop.peer_loops import one_step_off, synchronous
from bench.async_loop.perfect_loop import step_ends
from bench.async_loop.routed_loop import run_routed
from bench.async_loop.step_path import StepPath, step_path
from bench.async_loop.workload import Scenario, scenario
from bench.support.new_folder import new_folder
from penstock.config import LogConfig
from penstock.telemetry import log
from services.trainer.config import TrainerConfig

MIN_OF_BEST = 0.95
MAX_CORES = 0.5
_MIN_STEPS = 4
_NUM_ROUTED = 5
_SLACK = 4.0
"""A run that takes this many times the best is abandoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run with one bound on staleness, in steps per second over the steps `num_warmup` to `num_steps`."""

    max_staleness: int
    seed: int
    """Of the durations."""
    num_steps: int
    measured: float
    best: float
    routed: Sequence[float]
    """Of several runs that differ by chance."""
    not_streamed: float
    ideal: float
    synchronous: float
    one_step_off: float
    run: Measured
    path: StepPath
    span_s: float
    num_groups: int

    @property
    def of_best(self) -> float:
        """Measured steps per second as a share of the best."""
        return self.measured / self.best

    @property
    def routed_of_best(self) -> float:
        """The same with placement and chunks alone, in the mean."""
        return statistics.mean(self.routed) / self.best

    @property
    def cores(self) -> float:
        """Cores that the control plane used."""
        return sum(seconds for name, seconds in self.run.cpu_s.items() if name != ENGINES) / self.span_s


async def measure(pool: Scenario, *, max_staleness: int, seconds: float, folder: Path) -> Result:
    """Run the loop for about this many seconds beyond its start."""
    num_warmup = 1 + 2 * min(max_staleness, 2)
    first = step_ends(pool, max_staleness=max_staleness, num_steps=num_warmup + _MIN_STEPS)
    step_s = (first[-1] - first[num_warmup - 1]) / _MIN_STEPS
    num_steps = num_warmup + max(_MIN_STEPS, round(seconds / step_s))
    best = step_ends(pool, max_staleness=max_staleness, num_steps=num_steps)

    def rate(ends: Sequence[float]) -> float:
        return (num_steps - num_warmup) / (ends[num_steps - 1] - ends[num_warmup - 1])

    run = await run_loop(
        pool,
        folder,
        max_staleness=max_staleness,
        num_warmup=num_warmup,
        num_steps=num_steps,
        timeout_s=60.0 + _SLACK * best[-1],
    )
    pass_tokens = TrainerConfig().micro_batch_tokens
    # They run their own loops, in virtual time, and a thread has no other loop.
    routed = await asyncio.to_thread(
        lambda: [
            run_routed(
                pool,
                max_staleness=max_staleness,
                num_steps=num_steps,
                pass_tokens=pass_tokens,
                chance=random.Random(number),
            ).ends
            for number in range(_NUM_ROUTED)
        ]
    )
    counted = range(num_warmup * pool.groups_per_step, num_steps * pool.groups_per_step)
    return Result(
        max_staleness=max_staleness,
        seed=pool.workload.seed,
        num_steps=num_steps - num_warmup,
        measured=rate(run.ends),
        best=rate(best),
        routed=[rate(ends) for ends in routed],
        not_streamed=rate(step_ends(pool, max_staleness=max_staleness, num_steps=num_steps, streams=False)),
        ideal=(num_steps - num_warmup) / max(pool.rollout_s(counted), pool.train_s(counted)),
        synchronous=rate(synchronous(pool, num_steps=num_steps)),
        one_step_off=rate(one_step_off(pool, num_steps=num_steps)),
        run=run,
        path=step_path(folder / "run", range(num_warmup + 1, num_steps + 1)),
        span_s=run.ends[-1] - run.ends[num_warmup - 1],
        num_groups=len(counted),
    )


def report(pool: Scenario, results: Sequence[Result]) -> None:
    """Print the tables of one pool."""
    work, num = pool.workload, 1024
    sample_s = pool.rollout_s(range(num)) * pool.num_slots / (num * work.samples_per_group)
    rollout_s, train_s = (
        seconds(range(num)) * pool.groups_per_step / num for seconds in (pool.rollout_s, pool.train_s)
    )
    sys.stdout.write(
        f"\n### {pool.replicas} replicas\n\n{pool.num_slots} slots, {pool.groups_per_step} groups of "
        f"{work.samples_per_group} samples a step; a sample takes {sample_s:.2f} s on average and at most "
        f"{work.max_tokens * work.token_s:.1f} s; R/n = {rollout_s:.2f} s, U = {train_s:.2f} s\n"
    )
    rows = [
        (
            *(each.max_staleness, each.seed, each.num_steps, f"{each.measured:.4f}", f"{each.best:.4f}"),
            *(f"{each.of_best:.1%}", _mean_and_deviation([run / each.best for run in each.routed])),
            *(f"{each.not_streamed / each.best:.0%}", f"{each.ideal:.4f}"),
            *(f"{each.best / each.ideal:.0%}", f"{each.synchronous:.4f}", f"{each.one_step_off:.4f}"),
        )
        for each in results
    ]
    headings = (
        "max_staleness",
        "seed",
        "steps",
        "steps/s, measured",
        "best",
        "measured / best",
        "routed / best",
        "not streamed / best",
        "ideal",
    )
    _table((*headings, "best / ideal", "whole batch, synchronous", "whole batch, one step off"), rows)
    names = list(results[0].run.cpu_s)
    _table(
        (
            "max_staleness",
            "seed",
            "groups/s",
            *(f"{name}, ms/group" for name in names),
            "control plane, cores",
            "push s (pause s)",
            "group delivered, step pushed, group begun, ms",
            "prefill_ratio",
        ),
        [
            (
                each.max_staleness,
                each.seed,
                f"{each.num_groups / each.span_s:.2f}",
                *(f"{1e3 * each.run.cpu_s[name] / each.num_groups:.1f}" for name in names),
                f"{each.cores:.2f}",
                f"{each.run.push_s:.2f} ({each.run.pause_s:.2f})",
                ", ".join("" if part is None else f"{1e3 * part:.0f}" for part in asdict(each.path).values()),
                f"{each.run.prefill_ratio:.2f}",
            )
            for each in results
        ],
    )
    if len({each.seed for each in results}) > 1:
        _table(
            ("max_staleness", "seeds", "measured / best", "routed / best"),
            [
                (
                    *(bound, len(runs), _mean_and_deviation([run.of_best for run in runs])),
                    _mean_and_deviation([run.routed_of_best for run in runs]),
                )
                for bound, runs in _by_bound(results).items()
            ],
        )


def worst_of_best(results: Sequence[Result]) -> float:
    """Return the smallest share of the best that any bound's runs reach in the mean."""
    return min(statistics.mean(run.of_best for run in runs) for runs in _by_bound(results).values())


def _by_bound(results: Sequence[Result]) -> dict[int, list[Result]]:
    runs: dict[int, list[Result]] = {}
    for each in results:
        runs.setdefault(each.max_staleness, []).append(each)
    return runs


def _mean_and_deviation(shares: Sequence[float]) -> str:
    return f"{statistics.mean(shares):.1%} ± {statistics.stdev(shares):.1%}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    lines = [headings, ["---"] * len(headings), *rows]
    sys.stdout.write("\n" + "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines))
    sys.stdout.flush()


def _slots_of(replicas: int) -> int:
    """Return a number of slots that makes the batch large enough and that the machine can carry."""
    return max(1, min(8, 128 // replicas))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4], help="values of max_staleness")
    parser.add_argument("--seconds", type=float, default=120.0, help="measured for each value; at least four steps")
    parser.add_argument(
        "--slots", type=int, help="samples that one engine generates at once; default: 8, fewer of many"
    )
    parser.add_argument("--sample-s", type=float, default=20.0, help="mean seconds of a sample")
    parser.add_argument("--train-share", type=float, default=0.8, help="U / (R/n)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the durations; each gives every row")
    parser.add_argument("--folder", type=new_folder, help="new folder for the runs, their logs and metrics")
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    return parser.parse_args()


async def main(options: argparse.Namespace) -> int:
    """Return 0 if all bars hold."""
    log.configure(LogConfig(level="warning"), service="bench")
    found: dict[int, list[Result]] = {}
    sys.stdout.write(f"load of the machine before: {os.getloadavg()[0]:.1f}\n")
    with tempfile.TemporaryDirectory(prefix="async-", ignore_cleanup_errors=True) as scratch:
        for replicas in options.replicas:
            pools = [
                scenario(
                    replicas,
                    slots=options.slots or _slots_of(replicas),
                    sample_s=options.sample_s,
                    train_share=options.train_share,
                    seed=seed,
                )
                for seed in options.seeds
            ]
            found[replicas] = []
            for max_staleness, pool in itertools.product(options.staleness, pools):
                name = f"{replicas}-replicas-staleness-{max_staleness}-seed-{pool.workload.seed}"
                folder = (options.folder or Path(scratch)) / name
                try:
                    result = await measure(pool, max_staleness=max_staleness, seconds=options.seconds, folder=folder)
                except LoopError as error:
                    sys.stderr.write(f"{name}: {error}\n")
                    return 1
                found[replicas].append(result)
            report(pools[0], found[replicas])
    sys.stdout.write(f"\nload of the machine after: {os.getloadavg()[0]:.1f}\n")
    if options.json is not None:
        options.json.write_text(
            json.dumps({key: [asdict(each) for each in results] for key, results in found.items()}, indent=1)
        )
    results = [each for of_size in found.values() for each in of_size]
    least = min(map(worst_of_best, found.values()))
    most = max(each.cores for each in results)
    stale = sum(each.run.stale_groups for each in results)
    bars = [
        ("of the best that the bound allows", f">= {MIN_OF_BEST:.0%}", f"{least:.1%}", least >= MIN_OF_BEST),
        ("control plane", f"<= {MAX_CORES} cores", f"{most:.2f}", most <= MAX_CORES),
        ("stale groups", "0", stale, stale == 0),
    ]
    _table(("bar", "asked", "worst", ""), [(*bar, "holds" if holds else "FAILS") for *bar, holds in bars])
    return 0 if all(holds for *_, holds in bars) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(_parse())))
