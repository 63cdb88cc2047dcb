"""The effect of hostile items on the reward service: lateness, the latency of others, memory, and tier 3's throughput.

The service runs in its own processes and is called over gRPC. Nothing else should run beside it.
"""

import asyncio
import contextlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from bench.reward.report import Report
from bench.reward.stored_items import hostile_items
from penstock.clients import RewardClient
from penstock.v1 import reward_pb2

_DEADLINE_S = 1.0
_MAX_LATE_S = 0.050
_MAX_MEMORY_MB = 600
_MAX_P99_RATIO = 2.0
_MIN_ITEMS_PER_S = 250
_HOSTILE_SHARE = 0.05
_ROUNDS = 3
_RATE = 60.0
"""Items that are sent in a second while latencies are measured."""

_SERVICE = """
import asyncio, sys
from penstock.telemetry import log
from penstock.config import LogConfig
from services.reward.config import RewardConfig
from services.reward.server import running

async def main():
    log.configure(LogConfig(level="error"), service="reward")
    async with running(RewardConfig(workers=int(sys.argv[1]))) as service:
        sys.stdout.write(service.rpc.address + "\\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def _service(num_workers: int) -> AsyncIterator[tuple[RewardClient, int]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "ignore", "-c", _SERVICE, str(num_workers)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    address = (await process.stdout.readline()).decode().strip()
    async with RewardClient(address) as client:
        yield client, process.pid
    process.stdin.close()
    await process.wait()


def _item(gold: str, response: str) -> reward_pb2.VerifyItem:
    return reward_pb2.VerifyItem(golds=[gold], response=response, profile="math", deadline_s=_DEADLINE_S)


def _symbolic_items() -> Iterator[reward_pb2.VerifyItem]:
    """Yield right answers that tier 1 does not decide, no two alike."""
    for n in itertools.count(2):
        yield _item(rf"\frac{{x}}{{x+{n}}}", rf"\boxed{{\frac{{{n}x}}{{{n}x+{n * n}}}}}")
        yield _item(rf"\tan {n}x", rf"\boxed{{\frac{{\sin {n}x}}{{\cos {n}x}}}}")
        yield _item(rf"\frac{{1}}{{x+{n}}}", rf"\boxed{{(x+{n})^{{-1}}}}")
        yield _item(rf"\ln {n}x", rf"\boxed{{\ln x + \ln {n}}}")


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def _ask(client: RewardClient, item: reward_pb2.VerifyItem) -> tuple[reward_pb2.Verdict, float]:
    started = time.perf_counter()
    (verdict,) = await client.verify_batch([item], timeout_s=60)
    return verdict, time.perf_counter() - started


async def _lateness(client: RewardClient, hostile: Sequence[reward_pb2.VerifyItem], num_at_once: int) -> list[float]:
    """Return the seconds beyond the deadline of every hostile item, without queueing if several are asked at once."""
    slots = asyncio.Semaphore(num_at_once)

    async def one(item: reward_pb2.VerifyItem) -> float:
        async with slots:
            verdict, latency_s = await _ask(client, item)
        return max(0.0, (latency_s if num_at_once == 1 else verdict.elapsed_s) - _DEADLINE_S)

    return list(await asyncio.gather(*map(one, hostile)))


async def _clean_latencies(
    client: RewardClient, seconds: float, share: float, hostile: Sequence[reward_pb2.VerifyItem]
) -> list[float]:
    """Return latencies of right items that need a worker, sent at `_RATE` with a share of hostile ones among them."""
    rng = random.Random(0)
    clean, bad = _symbolic_items(), itertools.cycle(rng.sample(hostile, len(hostile)))
    latencies: list[float] = []

    async def one(item: reward_pb2.VerifyItem) -> None:
        verdict, latency_s = await _ask(client, item)
        assert verdict.score == 1, verdict
        latencies.append(latency_s)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for n in range(int(seconds * _RATE)):
            await asyncio.sleep(max(0.0, started + n / _RATE - time.perf_counter()))
            if rng.random() < share:
                group.create_task(_ask(client, next(bad)))
            else:
                group.create_task(one(next(clean)))
    return latencies


async def _hanging(client: RewardClient, hostile: Sequence[reward_pb2.VerifyItem]) -> list[reward_pb2.VerifyItem]:
    """Return the hostile items that hold a worker until their deadline."""
    verdicts = [(item, (await _ask(client, item))[0]) for item in hostile]
    return [item for item, verdict in verdicts if verdict.status == reward_pb2.VERDICT_STATUS_TIMEOUT]


def _memory_mb(pid: int) -> float:
    """Return the proportional set size of the process and all its descendants."""
    total_kb = 0
    pids = [pid]
    while pids:
        one = pids.pop()
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total_kb += int(line.split()[1])
            for task in Path(f"/proc/{one}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    return total_kb / 1024


async def _watch_memory(pid: int, peaks: list[float]) -> None:
    while True:
        peaks.append(await asyncio.to_thread(_memory_mb, pid))
        await asyncio.sleep(0.2)


async def _throughput(report: Report) -> None:
    async with _service(1) as (client, _):
        items = list(itertools.islice(_symbolic_items(), 2000))
        await client.verify_batch(items[:100], timeout_s=60)
        started = time.perf_counter()
        verdicts = await client.verify_batch(items[100:], timeout_s=60)
        rate = len(verdicts) / (time.perf_counter() - started)
        latencies = [verdict.elapsed_s for verdict in verdicts]
        assert {verdict.score for verdict in verdicts} == {1.0}
    text = (
        f"{rate:.0f}/s, p50 {_percentile(latencies, 0.5) * 1e3:.1f} ms, p99 {_percentile(latencies, 0.99) * 1e3:.1f} ms"
    )
    report.bar(f"tier 3, one worker >= {_MIN_ITEMS_PER_S} items/s", holds=rate >= _MIN_ITEMS_PER_S, measured=text)


async def measure(report: Report, *, seconds: float) -> None:
    """Report every bar; latencies are measured for `seconds` each time."""
    await _throughput(report)
    hostile = [_item(item.gold, item.response) for item in hostile_items(report)]
    peaks: list[float] = []
    async with _service(2) as (client, pid):
        watch = asyncio.create_task(_watch_memory(pid, peaks))
        for num_at_once in (1, 8):
            late = await _lateness(client, hostile, num_at_once)
            report.bar(
                f"{len(late)} hostile items, {num_at_once} at once: late by <= {_MAX_LATE_S * 1e3:.0f} ms",
                holds=max(late) <= _MAX_LATE_S,
                measured=f"p99 {_percentile(late, 0.99) * 1e3:.0f} ms, max {max(late) * 1e3:.0f} ms",
            )
        for kind, items in (("hostile", hostile), ("that hang", await _hanging(client, hostile))):
            p99s: dict[float, list[float]] = {0.0: [], _HOSTILE_SHARE: []}
            p50s: dict[float, list[float]] = {0.0: [], _HOSTILE_SHARE: []}
            for _ in range(_ROUNDS):
                for share, found in p99s.items():
                    latencies = await _clean_latencies(client, seconds, share, items)
                    found.append(_percentile(latencies, 0.99))
                    p50s[share].append(_percentile(latencies, 0.5))
            before, after = (statistics.median(found) for found in p99s.values())
            report.bar(
                f"p99 of clean items at {_RATE:.0f}/s, 0 -> {_HOSTILE_SHARE:.0%} {kind}: <= x {_MAX_P99_RATIO:g}",
                holds=after <= _MAX_P99_RATIO * before,
                measured="p50/p99 in ms "
                + " -> ".join(
                    f"{statistics.median(p50s[share]) * 1e3:.1f}/{statistics.median(p99s[share]) * 1e3:.1f}"
                    for share in p99s
                ),
            )
        watch.cancel()
    report.bar(
        f"memory of all its processes, peak < {_MAX_MEMORY_MB} MB",
        holds=max(peaks) < _MAX_MEMORY_MB,
        measured=f"{max(peaks):.0f} MB",
    )
