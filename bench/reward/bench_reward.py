"""Measures the reward service beside the verifiers of other frameworks, in one run, and reports which of its bars hold.

    python bench/reward/bench_reward.py                        # everything but the soak, some minutes
    python bench/reward/bench_reward.py --only accuracy        # or throughput, serving, clients, hostile
    python bench/reward/bench_reward.py --soak                 # a day's worth of items, under half an hour on two cores

It writes files only with --json. The exit code is 1 if a bar fails.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from bench.reward import accuracy, hostile, many_clients, serving, soak, throughput
from bench.reward.report import Report
from bench.reward.service_process import ServiceProcess
from bench.reward.stored_items import stored_pairs
from bench.support.termination import exit_on_sigterm
from penstock.clients import RewardClient

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [ROOT / "tests/data/reward" / name for name in ("pairs.jsonl", "attacks.jsonl")]
PARTS = ("accuracy", "throughput", "serving", "clients", "hostile")


def main() -> int:
    """Return 0 if all measured bars hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--pairs", type=Path, nargs="+", help="files of labelled pairs, in place of our own and stored")
    parser.add_argument("--typical", type=int, default=20_000, help="items of the throughput without workers")
    parser.add_argument("--symbolic", type=int, default=1_000, help="items of the throughput of a worker")
    parser.add_argument("--batches", type=int, default=50, help="gRPC batches of 500")
    parser.add_argument("--calls", type=int, default=5_000, help="calls of one item, for each frontend")
    parser.add_argument("--clients", type=int, default=1_000, help="clients at once")
    parser.add_argument("--calls-per-client", type=int, default=10)
    parser.add_argument("--hostile-seconds", type=float, default=10.0, help="of each measurement beside hostile items")
    parser.add_argument("--soak", action="store_true", help="send a day's worth of items, and nothing else")
    parser.add_argument("--soak-fast", type=int, default=5_000_000)
    parser.add_argument("--soak-hostile", type=int, default=20_000)
    parser.add_argument("--soak-deadline", type=float, default=0.1, help="of a hostile item, in seconds")
    parser.add_argument("--json", type=Path, help="file to write all results to")
    arguments = parser.parse_args()
    if missing := [str(file) for file in arguments.pairs or () if not file.is_file()]:
        parser.error(f"--pairs: no file {', '.join(missing)}")
    exit_on_sigterm()
    report = Report()
    report.machine()
    asyncio.run(_soak(report, arguments) if arguments.soak else _measure(report, arguments))
    if arguments.json:
        report.write(arguments.json)
    return 0 if report.all_hold else 1


async def _measure(report: Report, arguments: argparse.Namespace) -> None:
    if "accuracy" in arguments.only:
        files = arguments.pairs or [*stored_pairs(report), *PAIRS]
        with ServiceProcess() as service:
            async with RewardClient(service.address) as client:
                await accuracy.measure(report, client, files)
    if "throughput" in arguments.only:
        await throughput.measure(report, num_typical=arguments.typical, num_symbolic=arguments.symbolic)
    if "serving" in arguments.only:
        await serving.measure(report, num_batches=arguments.batches, num_calls=arguments.calls)
    if "clients" in arguments.only:
        await many_clients.measure(report, num_clients=arguments.clients, num_calls=arguments.calls_per_client)
    if "hostile" in arguments.only:
        await hostile.measure(report, seconds=arguments.hostile_seconds)


async def _soak(report: Report, arguments: argparse.Namespace) -> None:
    await soak.measure(
        report,
        hostile=soak.hostile_questions(report),
        num_fast=arguments.soak_fast,
        num_hostile=arguments.soak_hostile,
        hostile_deadline_s=arguments.soak_deadline,
    )


if __name__ == "__main__":
    sys.exit(main())
