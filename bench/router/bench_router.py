"""The router's cost: latency, CPU and memory, proxied and by Route, beside direct calls and sglang-router.

    python bench/router/bench_router.py [--sglang-router /path/to/python]

Engines are simulated (bench/support/simulated_engine_process.py): each request takes a given time and costs next to
nothing. A given number of calls is kept in flight. The time of each call is chosen so that about `--rate` calls are
made per second at any number in flight, because a router's cost depends on calls; it is at least an engine's time for
the tokens, at `--ms-per-token`. The table's latencies are the time of a call beyond that; "added" is their excess over
direct calls over the same protocol. The subjects take turns for `--rounds` rounds, so that changes of the machine's
speed affect all of them, and its cores are kept awake. `--sglang-router` names a Python that has the wheel
sglang-router 0.3.2; without it that part is left out.
"""

import argparse
import asyncio
import gc
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.support.cores import StolenTime, cores_awake
from bench.support.router_subjects import Subject, cpu_s, pss_mib, subjects
from bench.support.termination import exit_on_sigterm
from penstock.config import LogConfig
from penstock.errors import PenstockError
from penstock.telemetry import log


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The results of calls at one number in flight."""

    over_ms: list[float]
    """Milliseconds of each call beyond the engine's time, sorted."""
    num_failed: int
    cpu_ms: float
    """CPU milliseconds of the router process per call."""
    pss_mib: float
    """Its memory while all calls were in flight, proportional set size."""

    def at(self, share: float) -> float:
        """Return a quantile of `over_ms`."""
        return self.over_ms[min(len(self.over_ms) - 1, int(share * len(self.over_ms)))]

    @classmethod
    def of_all(cls, turns: Sequence["Result"]) -> "Result":
        """Combine the results of all turns of a subject."""
        return cls(
            over_ms=sorted(itertools.chain.from_iterable(turn.over_ms for turn in turns)),
            num_failed=sum(turn.num_failed for turn in turns),
            cpu_ms=statistics.median(turn.cpu_ms for turn in turns),
            pss_mib=max(turn.pss_mib for turn in turns),
        )


async def measure(subject: Subject, *, num_in_flight: int, latency_s: float, duration_s: float) -> Result:
    """Keep this many calls in flight, and measure those that end within `duration_s` seconds.

    These seconds begin after the first calls have ended, and calls begin until they are over: as many begin as end
    meanwhile, so the router's time is that of whole calls, however long a call takes.

    Raises:
        SystemExit: no call was answered within these seconds.
    """
    clock = asyncio.get_running_loop().time
    over_ms: list[float] = []
    num_failed = 0
    counting, over = asyncio.Event(), asyncio.Event()

    async def play(number: int) -> None:
        nonlocal num_failed
        await asyncio.sleep(latency_s * number / num_in_flight)  # arrivals are even, not in bursts
        for turn in itertools.count():
            if over.is_set():
                return
            started = clock()
            try:
                await subject.call(f"session-{number}-{turn % 16}", latency_s)
            except (PenstockError, aiohttp.ClientError, TimeoutError) as error:
                num_failed += 1
                sys.stderr.write(f"{subject.name}: {error}\n")
            else:
                if counting.is_set() and not over.is_set():
                    over_ms.append((clock() - started - latency_s) * 1e3)

    calls = [asyncio.create_task(play(number)) for number in range(num_in_flight)]
    await asyncio.sleep(1.0 + latency_s)
    counting.set()
    cpu_before = cpu_s(subject.router)
    await asyncio.sleep(duration_s / 2)
    pss = pss_mib(subject.router)
    await asyncio.sleep(duration_s / 2)
    over.set()
    used_s = cpu_s(subject.router) - cpu_before
    await asyncio.gather(*calls)
    if not over_ms:
        raise SystemExit(f"{subject.name}: no call was answered within --duration-s {duration_s:g}; give more seconds")
    cpu_ms = used_s / len(over_ms) * 1e3
    return Result(over_ms=sorted(over_ms), num_failed=num_failed, cpu_ms=cpu_ms, pss_mib=pss)


async def hold(subject: Subject, *, num_in_flight: int, latency_s: float) -> tuple[int, float]:
    """Have this many calls in flight at once, each once; return the number lost, and the router's memory then."""
    tasks = [asyncio.ensure_future(subject.call(f"held-{number}", latency_s)) for number in range(num_in_flight)]
    await asyncio.sleep(latency_s)
    pss = pss_mib(subject.router)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    for failure in failures[:3]:
        sys.stderr.write(f"{subject.name}: {failure!r}\n")
    return len(failures), pss


async def main() -> int:
    """Return 0 if no call was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang-router", type=Path, help="a Python with the wheel sglang-router")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--held", type=int, default=4096, help="calls in flight at once, none of which may be lost")
    parser.add_argument("--rate", type=float, default=128.0, help="calls per second, about")
    parser.add_argument("--ms-per-token", type=float, default=4.0, help="the least that an engine takes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration-s", type=float, default=6.0, help="of one turn")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    options = parser.parse_args()
    exit_on_sigterm()
    log.configure(LogConfig(level="error"), service="bench")
    gc.freeze()
    stolen = StolenTime()
    with cores_awake():
        async with subjects(options) as compared:
            records = await compare(compared, options)
            lost = await hold_all(compared, options) if options.held else {}
    verdicts = [*judge(records), *(f"lost of {options.held} in flight: {name}: {num}" for name, num in lost.items())]
    sys.stdout.write("\n" + "\n".join(verdicts) + "\n")
    sys.stdout.write(f"time that the host took from all cores: {stolen.share():.1%}\n")
    if options.json is not None:
        options.json.write_text(json.dumps(records, indent=2))
    return 1 if sum(lost.values()) or any(row["failed"] for row in records) else 0


async def compare(compared: list[Subject], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of the table, each printed at once."""
    headings = (
        "in flight", "engine s", "", "calls/s", "p50 ms", "p99 ms", "p50 added", "p99 added", "p50 / direct",
        "CPU ms/call", "calls/s per core", "PSS MiB", "failed",
    )  # fmt: skip
    sys.stdout.write(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}\n")
    records = []
    for num_in_flight in options.in_flight:
        latency_s = max(options.tokens * options.ms_per_token / 1e3, num_in_flight / options.rate)
        turns: dict[str, list[Result]] = {subject.name: [] for subject in compared}
        for _ in range(options.rounds):
            for subject in compared:
                turns[subject.name].append(
                    await measure(
                        subject, num_in_flight=num_in_flight, latency_s=latency_s, duration_s=options.duration_s
                    )
                )
        results = {name: Result.of_all(each) for name, each in turns.items()}
        for subject in compared:
            baseline = results[subject.baseline]
            records.append(record(subject, num_in_flight, latency_s, results[subject.name], baseline))
            sys.stdout.write(f"| {' | '.join(map(str, records[-1].values()))} |\n")
        sys.stdout.flush()
    return records


async def hold_all(compared: list[Subject], options: argparse.Namespace) -> dict[str, int]:
    """Return how many of the calls in flight at once each subject lost."""
    sys.stdout.write(f"\n| {options.held} in flight at once | lost | PSS MiB |\n|---|---|---|\n")
    num_lost = {}
    for subject in compared:
        num_lost[subject.name], pss = await hold(
            subject, num_in_flight=options.held, latency_s=options.held / options.rate
        )
        sys.stdout.write(f"| {subject.name} | {num_lost[subject.name]} | {f'{pss:.0f}' if pss else ''} |\n")
        sys.stdout.flush()
    return num_lost


def judge(records: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each bar."""
    for row in records:
        if row["subject"] == "penstock, proxied" and row["in_flight"] == 256:
            yield verdict("proxied, p50 added at 256 in flight", row["p50_added_ms"], "ms", 2.0)
        if row["subject"] == "penstock, Route":
            excess = round((row["p50_ratio"] - 1) * 100, 2)
            yield verdict(f"Route, p50 beyond direct at {row['in_flight']} in flight", excess, "%", 5.0)


def verdict(what: str, measured: float, unit: str, bar: float) -> str:
    return f"{what}: {measured} {unit}, bar {bar} {unit}: {'HOLDS' if measured <= bar else 'FAILS'}"


def record(subject: Subject, num_in_flight: int, latency_s: float, result: Result, baseline: Result) -> dict[str, Any]:
    """Return one row."""
    rate = num_in_flight / (latency_s + statistics.mean(result.over_ms) / 1e3)
    ratio = (latency_s * 1e3 + result.at(0.5)) / (latency_s * 1e3 + baseline.at(0.5))
    between = subject.router is not None
    return {
        "in_flight": num_in_flight,
        "engine_s": round(latency_s, 3),
        "subject": subject.name,
        "rate": round(rate, 1),
        "p50_ms": round(result.at(0.5), 2),
        "p99_ms": round(result.at(0.99), 2),
        "p50_added_ms": round(result.at(0.5) - baseline.at(0.5), 2) if between else "",
        "p99_added_ms": round(result.at(0.99) - baseline.at(0.99), 2) if between else "",
        "p50_ratio": round(ratio, 4) if between else "",
        "cpu_ms": round(result.cpu_ms, 3) if between else "",
        "rate_per_core": round(1e3 / result.cpu_ms) if between and result.cpu_ms else "",
        "pss_mib": round(result.pss_mib, 1) if between else "",
        "failed": result.num_failed,
    }


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
