"""How far one router, one bus, a few workers and a trainer carry: long samples, up to thousands of engines.

    python bench/scale/bench_scale.py                                  # 64, 512 and 2,048 engines, in about 15 minutes
    python bench/scale/bench_scale.py --replicas 64 --steps 1          # a taste, in two minutes

All control processes are the real ones: nats-server, router, workers, and a trainer whose optimizer step takes no
time; engines are simulated (bench/scale/measured_run.py). A group has eight samples of about `--tokens` tokens;
`--samples-per-s` of them end in a second, far fewer than the engines would finish, since engines and control plane
share this machine. So what fills up first is extrapolated: each process's cost of a group, of an engine that is only
there (its lease), and of an engine in a push is measured, and costs are added (bench/scale/saturation.py), also up to
runs of other sizes: the last table is that of docs/scaling.md (bench/scale/larger_runs.py).

With 2,048 engines it needs 5 GiB of memory, and a hard limit on open files of 4,096 (`ulimit -Hn`). The exit code is 1
if the router, asked twice a second, ever listed fewer engines than there are or did not answer, or if less than
`MIN_OFFERED` of the load was carried.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.async_loop.measured_loop import LoopError
from bench.scale.larger_runs import ENGINES as ENGINES_OF_RUNS
from bench.scale.larger_runs import PLANNED_SHARE, most_engines, needs_of
from bench.scale.measured_run import ENGINES, NATS, ROUTER, TRAINER, WORKERS, Measured, run
from bench.scale.saturation import Costs, Point, Use, costs_of, first_to_saturate
from bench.scale.workload import SAMPLES_PER_GROUP, Load
from bench.support.new_folder import new_folder
from penstock.config import LogConfig
from penstock.telemetry import log

MIN_OFFERED = 0.8
_CONTROL = (NATS, ROUTER, WORKERS, TRAINER)
_REPLICAS_PER_PROCESS = 512


def report(measured: Sequence[Measured]) -> None:
    """Print the tables."""
    first = measured[0].load
    sys.stdout.write(
        f"\ngroups of {SAMPLES_PER_GROUP} samples of about {first.tokens:,} tokens; {first.groups_per_step} groups a "
        f"step, at most {first.groups_in_play} in play; {first.num_workers} workers\n"
    )
    _table(
        (
            *("engines", "steps", "groups/s", "of the load", "tokens/s", "bus read, MB/s", "bus written, MB/s"),
            *("push, s", "fewest engines listed", "first to fill its core", "at groups/s"),
        ),
        [
            (
                *(each.load.replicas, each.num_steps, f"{each.groups_per_s:.3f}"),
                *(f"{each.groups_per_s / each.offered_groups_per_s:.0%}", f"{each.tokens_per_s:,.0f}"),
                *(f"{each.bus_read_mb_per_s:.2f}", f"{each.bus_written_mb_per_s:.2f}", f"{each.push_s:.2f}"),
                *(each.fewest_replicas, *_first(each)),
            )
            for each in measured
        ],
    )
    _table(
        ("engines", *(f"{name}: idle, busy cores" for name in (*_CONTROL, ENGINES))),
        [(each.load.replicas, *(_cores(each.uses[name]) for name in (*_CONTROL, ENGINES))) for each in measured],
    )
    _table(
        ("engines", *(f"{name}, ms/group" for name in _CONTROL), *(f"{name}, MiB, open files" for name in _CONTROL)),
        [
            (
                each.load.replicas,
                *(f"{each.uses[name].ms_per_group(each.groups_per_s):.0f}" for name in _CONTROL),
                *(f"{each.memory_mib[name]:.0f}, {each.num_descriptors[name]}" for name in _CONTROL),
            )
            for each in measured
        ],
    )
    if measured[-1].load.replicas > first.replicas:
        rate = measured[0].groups_per_s
        _report_costs(
            costs(measured),
            tokens_per_group=SAMPLES_PER_GROUP * first.tokens,
            bus_mb_per_group=(measured[0].bus_read_mb_per_s / rate, measured[0].bus_written_mb_per_s / rate),
        )


def _report_costs(
    costs: Mapping[str, Costs], *, tokens_per_group: float, bus_mb_per_group: tuple[float, float]
) -> None:
    needed = [
        needs_of(engines, costs, tokens_per_group=tokens_per_group, bus_mb_per_group=bus_mb_per_group)
        for engines in ENGINES_OF_RUNS
    ]
    _table(
        ("process", "a group, ms", "1,000 engines, cores", "a push to 1,000 engines, s"),
        [
            (name, f"{1e3 * cost.group_s:.0f}", f"{1e3 * cost.replica_cores:.3f}", f"{1e3 * cost.push_s:.2f}")
            for name, cost in costs.items()
        ],
    )
    _table(
        (
            *("engines", "groups/s", "tokens/s", "routers", "workers", "rank 0 of the trainer, of its core"),
            *("nats-server, cores", "bus, MB/s read, written", "cores for verdicts on expressions"),
        ),
        [
            (
                *(f"{needs.engines:,}", f"{needs.groups_per_s:.1f}", f"{needs.tokens_per_s:,.0f}"),
                *(needs.num_routers or "none is enough", needs.num_workers, f"{needs.trainer_cores:.0%}"),
                *(f"{needs.nats_cores:.2f}", f"{needs.bus_read_mb_per_s:.1f}, {needs.bus_written_mb_per_s:.1f}"),
                f"{needs.verdict_cores:.2f}",
            )
            for needs in needed
        ],
    )
    for name, cores in ((ROUTER, PLANNED_SHARE), (TRAINER, 1.0)):
        most = most_engines(costs[name], tokens_per_group=tokens_per_group, cores=cores)
        if most is not None:
            sys.stdout.write(f"one {name} carries {most:,} such engines with {cores:.0%} of its core\n")


def costs(measured: Sequence[Measured]) -> dict[str, Costs]:
    """Return the costs of each control process, from the fewest and the most engines measured."""

    def point(each: Measured, name: str) -> Point:
        rate = each.groups_per_s
        return Point(
            replicas=each.load.replicas,
            groups_per_s=rate,
            pushes_per_s=rate / each.load.groups_per_step,
            use=each.uses[name],
        )

    return {name: costs_of(point(measured[0], name), point(measured[-1], name)) for name in _CONTROL}


def _first(each: Measured) -> tuple[str, str]:
    name, rate = first_to_saturate({name: each.uses[name] for name in _CONTROL}, each.groups_per_s)
    return name, f"{rate:.2f}"


def _cores(use: Use) -> str:
    return f"{use.idle_cores:.3f}, {use.cores:.3f}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    lines = [headings, ["---"] * len(headings), *rows]
    sys.stdout.write("\n" + "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines))
    sys.stdout.flush()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--tokens", type=int, default=16_384, help="median of a sample")
    parser.add_argument("--samples-per-s", type=float, default=2.0, help="that all engines together finish in a second")
    parser.add_argument("--groups-per-step", type=int, default=8, help="twice as many are in play")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="measured for each number of engines")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those, at least 1")
    parser.add_argument("--idle-s", type=float, default=20.0, help="measured without groups")
    parser.add_argument("--folder", type=new_folder, help="new folder for the runs and their logs")
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    options = parser.parse_args()
    if options.warm_up < 1 or options.steps < 1:
        parser.error(f"--warm-up {options.warm_up} and --steps {options.steps} must be at least 1")
    return options


async def main(options: argparse.Namespace) -> int:
    """Return 0 if every engine was listed all the time and the load was carried."""
    log.configure(LogConfig(level="warning"), service="bench")
    sys.stdout.write(f"load of the machine before: {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores\n")
    measured = []
    with tempfile.TemporaryDirectory(prefix="scale-", ignore_cleanup_errors=True) as scratch:
        for replicas in sorted(options.replicas):
            load = Load(
                replicas=replicas,
                tokens=options.tokens,
                samples_per_s=options.samples_per_s,
                groups_per_step=options.groups_per_step,
                num_workers=options.workers,
                num_engine_processes=-(-replicas // _REPLICAS_PER_PROCESS),
            )
            folder = (options.folder or Path(scratch)) / f"{replicas}-engines"
            try:
                measured.append(
                    await run(load, folder, idle_s=options.idle_s, num_warmup=options.warm_up, num_steps=options.steps)
                )
            except LoopError as error:
                sys.stderr.write(f"{replicas} engines: {error}\n")
                return 1
            report(measured[-1:])
    if len(measured) > 1:
        report(measured)
    sys.stdout.write(f"\nload of the machine after: {os.getloadavg()[0]:.1f}\n")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in measured], indent=1))
    holds = all(
        each.fewest_replicas == each.load.replicas and each.groups_per_s >= MIN_OFFERED * each.offered_groups_per_s
        for each in measured
    )
    sys.stdout.write(f"every engine listed, and at least {MIN_OFFERED:.0%} of the load carried: {holds}\n")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(_parse())))
