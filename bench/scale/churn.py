"""Replicas that join and leave at random under steady load, and the cost: calls, evenness, affinity.

    python bench/scale/churn.py [--minutes 10]

One real router, a real NATS server, real gRPC; the engines are simulated (bench/support/churn_engines.py), each in its
own process, of different sizes. About every `--leave-every-s` seconds one leaves: half are killed with -9, half drain.
Another joins a little later, so that there are always nearly `--replicas`. Meanwhile `--sessions` sessions at a time
make turn after turn. Three bars:

- *lost*: every call is answered, and every answer is complete: each token once, in order.
- *even*: during its life a replica has its fair share of the load: its max_running divided by that of all present
  replicas. Its load divided by the sum of its shares is 1 if all is even, and may be 0.9 to 1.1. This is measured for
  the calls given and for the load (the total time of calls in flight) of replicas that lived for `--min-life-s`. The
  bar is the load, because the calls given include those that bring a newcomer up to the others.
- *affinity*: a session's second and later turns go where the previous turn went, unless that replica has begun to
  leave.

Answers reveal which replica had a call: each replica serves its own policy version, which stamps its tokens. The exit
code is 1 if a bar fails.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.support.churn_measures import Life, Turn, affinity, shares
from bench.support.router_subjects import RUN, cpu_s, penstock_router, pss_mib
from bench.support.termination import exit_on_sigterm
from penstock.bus.local_server import local_server
from penstock.clients import GenerateClient
from penstock.config import LogConfig
from penstock.errors import PenstockError
from penstock.telemetry import log
from penstock.v1 import generate_pb2

ROOT = Path(__file__).resolve().parents[2]
ENGINES_SCRIPT = ROOT / "bench" / "support" / "churn_engines.py"
FIRST_ID = 1000
"""First token id of simulated engines' answers."""
TIMEOUT_S = 120.0
JOIN_TIMEOUT_S = 60.0
MAX_UNEVEN = 0.1


@dataclass(slots=True, kw_only=True)
class Replica(Life):
    """One engine."""

    joined: asyncio.Event = field(default_factory=asyncio.Event)
    pid: int = 0


class Fleet:
    """The engines, including those that have left."""

    def __init__(self, zygote: asyncio.subprocess.Process, sizes: list[int]) -> None:
        self._zygote = zygote
        self._sizes = sizes
        self.replicas: list[Replica] = []

    def living(self) -> list[Replica]:
        return [each for each in self.replicas if each.is_there(time.monotonic())]

    async def add(self) -> Replica:
        """Start an engine and wait until it serves. Its policy version is its number."""
        number = len(self.replicas) + 1
        replica = Replica(replica_id=f"r{number:04}", max_running=self._sizes[number % len(self._sizes)])
        self.replicas.append(replica)
        settings = {"replica_id": replica.replica_id, "policy_version": number, "max_running": replica.max_running}
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps(settings).encode() + b"\n")
        await asyncio.wait_for(replica.joined.wait(), JOIN_TIMEOUT_S)
        return replica

    async def listen(self) -> None:
        """Note engines that report that they serve."""
        assert self._zygote.stdout is not None
        by_id = {}
        async for line in self._zygote.stdout:
            told = json.loads(line)
            by_id.update({each.replica_id: each for each in self.replicas})
            replica = by_id[told["replica_id"]]
            replica.pid, replica.came_at = told["pid"], time.monotonic()
            replica.joined.set()

    def remove(self, replica: Replica, number: signal.Signals) -> None:
        """Kill the engine or let it drain."""
        replica.left_at = time.monotonic()
        os.kill(replica.pid, number)


class Load:
    """Sessions that play turns."""

    def __init__(self, client: GenerateClient, options: argparse.Namespace) -> None:
        self._client = client
        self._options = options
        self.sessions: list[list[Turn]] = []
        self.num_lost = 0

    async def play(self, number: int, until: float) -> None:
        """Play one session after the other, each of one to eight turns with short pauses."""
        chance = random.Random(f"{self._options.seed}-{number}")
        await asyncio.sleep(chance.uniform(0.0, 8 * self._options.token_s))
        for count in itertools.count():
            turns: list[Turn] = []
            self.sessions.append(turns)
            for _ in range(chance.randint(1, 8)):
                if time.monotonic() >= until:
                    return
                await self._turn(f"s{number}-{count}", turns, chance.randint(4, 12))
                await asyncio.sleep(chance.uniform(0.0, self._options.token_s))

    async def _turn(self, session: str, turns: list[Turn], num_tokens: int) -> None:
        request = generate_pb2.GenerateRequest(
            request_id=f"{session}-{len(turns)}",
            session_id=session,
            input_ids=[1, 2, 3],
            sampling=generate_pb2.SamplingParams(max_new_tokens=num_tokens),
        )
        started_at = time.monotonic()
        try:
            answer = await self._client.generate(request, timeout_s=TIMEOUT_S)
        except PenstockError as error:
            self.num_lost += 1
            sys.stderr.write(f"{request.request_id} is lost: {error}\n")
            return
        if list(answer.output_ids) != list(range(FIRST_ID, FIRST_ID + num_tokens)):
            self.num_lost += 1
            sys.stderr.write(f"{request.request_id} is not whole: {list(answer.output_ids)}\n")
            return
        replica_ids = [f"r{span.policy_version:04}" for span in answer.version_spans]
        turns.append(Turn(started_at=started_at, ended_at=time.monotonic(), replica_ids=replica_ids))


async def churn(fleet: Fleet, options: argparse.Namespace, until: float) -> None:
    """Have engines leave and join."""
    chance, joining = random.Random(options.seed), set[asyncio.Task[None]]()

    async def join_later() -> None:
        await asyncio.sleep(chance.uniform(0.0, 4 * options.leave_every_s))
        await fleet.add()

    while (wait_s := chance.expovariate(1 / options.leave_every_s)) < until - time.monotonic():
        await asyncio.sleep(wait_s)
        fleet.remove(chance.choice(fleet.living()), chance.choice((signal.SIGKILL, signal.SIGTERM)))
        joining.add(asyncio.create_task(join_later()))
    await asyncio.gather(*joining)


@contextlib.asynccontextmanager
async def fleet_of(url: str, options: argparse.Namespace) -> AsyncIterator[Fleet]:
    command = [sys.executable, ENGINES_SCRIPT, f"--url={url}", f"--run={RUN}"]
    command += [f"--token-s={options.token_s}", f"--grace-s={options.grace_s}"]
    zygote = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    fleet = Fleet(zygote, options.sizes)
    listening = asyncio.create_task(fleet.listen())
    try:
        for _ in range(options.replicas):
            await fleet.add()
        yield fleet
    finally:
        listening.cancel()
        assert zygote.stdin is not None
        zygote.stdin.close()
        await zygote.wait()


async def main() -> int:
    """Return 0 if all bars hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--sessions", type=int, default=512, help="that play at a time")
    parser.add_argument("--token-s", type=float, default=0.5, help="of an engine; answers have four to twelve")
    parser.add_argument("--grace-s", type=float, default=2.0, help="of an engine that drains")
    parser.add_argument("--leave-every-s", type=float, default=2.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32], help="max_running of replicas, in turn")
    parser.add_argument("--min-life-s", type=float, default=60.0, help="of replicas that are asked about evenness")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-level", default="error", help="of the router, which warns of every replica that left")
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    options = parser.parse_args()
    exit_on_sigterm()
    options.load_before = os.getloadavg()[0]
    log.configure(LogConfig(level="error"), service="bench")
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = await stack.enter_async_context(local_server(folder))
        fleet = await stack.enter_async_context(fleet_of(url, options))
        address, router = await stack.enter_async_context(
            penstock_router(url, options.replicas, log_level=options.log_level)
        )
        client = await stack.enter_async_context(GenerateClient(address))
        load = Load(client, options)
        started, cpu_before = time.monotonic(), cpu_s(router)
        until = started + 60.0 * options.minutes
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(churn(fleet, options, until))
            for number in range(options.sessions):
                tasks.create_task(load.play(number, until))
        elapsed_s, used_s = time.monotonic() - started, cpu_s(router) - cpu_before
        pss = pss_mib(router)
    return report(fleet, load, options, until=until, elapsed_s=elapsed_s, used_s=used_s, pss=pss)


def report(
    fleet: Fleet, load: Load, options: argparse.Namespace, *, until: float, elapsed_s: float, used_s: float, pss: float
) -> int:
    """Print the results; return 0 if all bars hold."""
    turns = list(itertools.chain.from_iterable(load.sessions))
    latencies = sorted(turn.ended_at - turn.started_at for turn in turns)
    asked = [each for each in shares(fleet.replicas, load.sessions, until=until) if each.lived_s >= options.min_life_s]
    if not asked:
        sys.stderr.write(f"no replica was there for {options.min_life_s:g} s; raise --minutes or --leave-every-s\n")
        return 1
    num_later, num_bound, num_kept = affinity(fleet.replicas, load.sessions)
    table(
        ("measured", ""),
        [
            ("minutes", f"{elapsed_s / 60:.1f}"),
            ("load of the machine before and after", f"{options.load_before:.1f}, {os.getloadavg()[0]:.1f}"),
            ("replicas at a time (simulated), max_running", f"{options.replicas}, {options.sizes}"),
            ("replicas that left, joined", f"{num_left(fleet)}, {len(fleet.replicas) - options.replicas}"),
            ("calls, per second", f"{len(turns)}, {len(turns) / elapsed_s:.1f}"),
            ("calls that went on elsewhere", sum(len(turn.replica_ids) > 1 for turn in turns)),
            ("s per call, p50, p99", f"{latencies[len(turns) // 2]:.2f}, {latencies[int(0.99 * len(turns))]:.2f}"),
            ("router's CPU ms/call, PSS MiB", f"{used_s / len(turns) * 1e3:.2f}, {pss:.0f}"),
            ("second and later turns, with a replica that stayed", f"{num_later}, {num_bound}"),
        ],
    )
    rows = []
    for size in (None, *sorted(set(options.sizes))):
        of_size = [each for each in asked if size in (None, each.life.max_running)]
        name = "all" if size is None else f"max_running = {size}"
        rows.append(
            (name, len(of_size), *_spread([each.calls for each in of_size]), *_spread([each.load for each in of_size]))
        )
    headings = (
        "even = 1",
        "replicas",
        "calls: least",
        "mean",
        "most",
        "mean off",
        "load: least",
        "mean",
        "most",
        "mean off",
    )
    table(headings, rows)
    most = max(abs(each.load - 1.0) for each in asked)
    bars = [
        ("lost", "0", load.num_lost, load.num_lost == 0),
        ("even", f"within {MAX_UNEVEN:.0%}", f"{most:.1%}", most <= MAX_UNEVEN),
        ("affinity", "100%", f"{num_kept / max(1, num_bound):.3%}", num_kept == num_bound),
    ]
    table(("bar", "asked", "measured", ""), [(*bar, "holds" if holds else "FAILS") for *bar, holds in bars])
    if options.json is not None:
        of_each = [(each.life.replica_id, each.life.max_running, each.lived_s, each.calls, each.load) for each in asked]
        options.json.write_text(json.dumps({"bars": bars, "shares": of_each}, indent=1))
    return 0 if all(holds for *_, holds in bars) else 1


def num_left(fleet: Fleet) -> int:
    return sum(each.left_at < math.inf for each in fleet.replicas)


def _spread(values: list[float]) -> list[str]:
    """Return minimum, mean, maximum, and the mean distance from 1."""
    if not values:
        return [""] * 4
    off = statistics.mean(abs(value - 1.0) for value in values)
    return [f"{value:.3f}" for value in (min(values), statistics.mean(values), max(values), off)]


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    lines = [headings, ["---"] * len(headings), *rows]
    sys.stdout.write("\n" + "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
