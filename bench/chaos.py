"""Kills processes of a real run at random and counts what it cost: groups lost, groups trained twice, time.

    python bench/chaos.py [--kills 50] [--replicas 1] [--prefill 1] [--decode 2] [--transport auto] [--seed 0]

A whole `penstock train` of the tiny recipe, every process the real one. A victim is drawn among engines of each role,
the router and the worker (`--also trainer reward` adds more), and killed with -9 at a random moment; the next dies when
the run has trained `--steps-between` steps more, whether or not the last is back. Every group index is trained exactly
once, or a bar fails. It is the counting that matters here: speed is measured by bench_demo.py.
"""

import argparse
import collections
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from penstock.testing.train_process import RECIPE, TrainProcess, started  # noqa: E402

GROUPS_PER_STEP = 8
SERVICES = ("rollout", "prefill", "decode", "router", "worker")
STALL_S = 240.0
"""A run that trains no step for so long hangs."""
MAX_SAME_VERSION_DLOGP = 1e-4


@dataclass(slots=True)
class Kills:
    """What was killed, and how long it was away. Times are of `time.monotonic`."""

    by_service: "collections.Counter[str]" = field(default_factory=collections.Counter)
    away_s: "dict[str, list[float]]" = field(default_factory=lambda: collections.defaultdict(list))
    """From the kill to the next process of that name, by service. Engines then still load for some seconds."""
    num_not_back: "collections.Counter[str]" = field(default_factory=collections.Counter)
    """By service: those that were still away when the run ended; how long until then is counted as their time."""
    away: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By name: the process that was killed, and when."""

    def add(self, name: str, pid: int, now: float) -> None:
        """The process of that name was killed. Call `look` with the same processes before."""
        self.by_service[_service(name)] += 1
        self.away.setdefault(name, (pid, now))

    def look(self, processes: Mapping[str, int], now: float) -> None:
        """Note who is back."""
        for name, (old_pid, since) in list(self.away.items()):
            if processes.get(name, old_pid) != old_pid:
                self.away_s[_service(name)].append(now - since)
                del self.away[name]

    def end(self, now: float) -> None:
        """The run has ended; nobody will come back."""
        for name, (_, since) in self.away.items():
            self.away_s[_service(name)].append(now - since)
            self.num_not_back[_service(name)] += 1
        self.away.clear()


def main() -> int:
    """Return 0 if nothing was lost."""
    arguments = parse()
    num_steps = arguments.kills * arguments.steps_between + 2 * arguments.steps_between
    services = {*SERVICES, *arguments.also}
    settings = {
        "trainer.num_steps": num_steps,
        "trainer.groups_per_step": GROUPS_PER_STEP,
        "trainer.samples_per_group": 4,
        "trainer.checkpoint_every": 5,
        "rollout.replicas": arguments.replicas,
        "rollout.prefill": arguments.prefill,
        "rollout.decode": arguments.decode,
        "launch.max_restarts": 10_000,
        "run.seed": arguments.seed,
        "trainer.weight_sync.transport": arguments.transport,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.runs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        overrides = [f"--{key}={value}" for key, value in {**settings, "run.dir": folder / "runs"}.items()]
        begun = time.monotonic()
        with started(folder, str(RECIPE), *overrides) as train:
            kills = kill_at_random(train, services, arguments)
            exit_code = train.wait(STALL_S + 5.0 * num_steps)
            wall_s = time.monotonic() - begun
            return tell(train, kills, exit_code, num_steps=num_steps, wall_s=wall_s)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps-between", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=1, help="engines that both prefill and decode")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--also", nargs="*", default=[], choices=["trainer", "reward"], help="kill these too")
    parser.add_argument("--transport", default="auto", help="trainer.weight_sync.transport")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, help="where to keep the run folder; default: a folder that is removed")
    return parser.parse_args()


def kill_at_random(train: TrainProcess, services: set[str], arguments: argparse.Namespace) -> Kills:
    """Kill the wanted number of processes, one after the other, at random moments of the run."""
    draw = random.Random(arguments.seed)
    kills, due = Kills(), arguments.steps_between

    def is_due() -> bool:
        kills.look(train.processes(), time.monotonic())
        return any(row["step"] >= due for row in train.rows()[-1:])

    def nobody_is_away() -> bool:
        has_ended = train.process.poll() is not None
        kills.look(train.processes(), time.monotonic())
        return has_ended or not kills.away

    for number in range(arguments.kills):
        train.wait_until(is_due, f"step {due}", STALL_S)
        time.sleep(draw.random())  # somewhere in the step, not at its end
        processes = {name: pid for name, pid in train.processes().items() if _service(name) in services}
        kills.look(processes, time.monotonic())
        present = sorted({_service(name) for name in processes})
        service = draw.choice(present)
        name = draw.choice(sorted(name for name in processes if _service(name) == service))
        os.kill(processes[name], signal.SIGKILL)
        kills.add(name, processes[name], time.monotonic())
        due = train.rows()[-1]["step"] + arguments.steps_between
        _say(f"{number + 1}/{arguments.kills}: killed {name} after step {due - arguments.steps_between}")
    train.wait_until(nobody_is_away, "the last to be back", STALL_S)
    kills.end(time.monotonic())
    return kills


def tell(train: TrainProcess, kills: Kills, exit_code: int, *, num_steps: int, wall_s: float) -> int:
    """Print the table; returns 0 if every bar holds."""
    rows = train.rows()
    trained = collections.Counter(index for row in rows for index in row["groups"])
    num_wanted = num_steps * GROUPS_PER_STEP
    same_version = [row["dlogp_max_current"] for row in rows if "dlogp_max_current" in row]
    _say("\n| service | kills | away s, median | away s, longest | still away at the end |\n|---|---|---|---|---|")
    for service, count in sorted(kills.by_service.items()):
        away_s = sorted(kills.away_s[service]) or [float("nan")]
        _say(
            f"| {service} | {count} | {away_s[len(away_s) // 2]:.1f} | {away_s[-1]:.1f} | "
            f"{kills.num_not_back[service]} |"
        )
    last: dict[str, Any] = rows[-1] if rows else {}
    checks = {
        "run finished": (
            exit_code == 0 and len(rows) == num_steps,
            f"exit {exit_code}, {len(rows)} of {num_steps} steps",
        ),
        "groups lost": (len(trained) == num_wanted, f"{num_wanted - len(trained)} of {num_wanted}"),
        "groups trained twice": (max(trained.values(), default=0) == 1, f"{sum(trained.values()) - len(trained)}"),
        "trained beyond the staleness bound": _count(row["staleness_max"] > row["max_staleness"] for row in rows),
        "groups failed": (last.get("num_failed_groups") == 0, str(last.get("num_failed_groups"))),
        "versions used twice": _count(
            one["policy_version"] >= next_one["policy_version"] for one, next_one in itertools.pairwise(rows)
        ),
        "max |dlogp| where no version lies between": (
            bool(same_version) and all(value < MAX_SAME_VERSION_DLOGP for value in same_version),
            f"{max(same_version):.1e} in {len(same_version)} steps" if same_version else "measured in no step",
        ),
        "processes left": (not train.pids(), str(len(train.pids()))),
    }
    _say("\n| what | seen | |\n|---|---|---|")
    for what, (holds, seen) in checks.items():
        _say(f"| {what} | {seen} | {'holds' if holds else 'FAILS'} |")
    _say(f"\n{sum(kills.by_service.values())} kills in {wall_s:.0f} s; stale groups played again: "
         f"{last.get('num_stale_groups')}")  # fmt: skip
    return 0 if all(holds for holds, _ in checks.values()) else 1


def _count(faults: Any) -> tuple[bool, str]:
    num_faults = sum(faults)
    return num_faults == 0, str(num_faults)


def _service(name: str) -> str:
    return name.rpartition("-")[0] or name


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
