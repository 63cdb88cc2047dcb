"""Kills and freezes processes of a real run at random and counts the cost: groups lost, groups trained twice, time.

    python bench/chaos.py [--kills 50] [--freezes 50] [--replicas 1] [--prefill 1] [--decode 2] [--transport auto]
    python bench/chaos.py --recipe tiny-multi-turn --kills 8 --freezes 8 --prefill 0 --decode 0 --replicas 2
    python bench/chaos.py --nats-servers 3 --kills 8 --freezes 8
    python bench/chaos.py --ranks 2 --kills 8 --freezes 8

It runs a whole `penstock train` of a tiny recipe with real processes. A victim is drawn among the services, trainer and
nats-server included (`--spare trainer` leaves some out), and with `--ranks` among the ranks that the trainer starts. At
a random moment it is killed with -9, or stopped with all its descendants by SIGSTOP and continued after 2 to 20 s.
Fault n is due when the run has trained n times `--steps-between` steps, whether or not the last victim is back; steps
that pass during a freeze bring the next faults closer together, and a freeze ends early if the run would end before its
last fault. With `--nats-servers` the bus is a cluster, whose killed servers start again after 2 to 20 s, too. Every
group index is trained exactly once, or a bar fails. Only the counting matters here: bench_demo.py measures speed.
"""

import argparse
import collections
import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.support.new_folder import new_folder
from bench.support.termination import exit_on_sigterm
from penstock.testing.local_cluster import LocalCluster, local_cluster
from penstock.testing.tolerance import MAX_DLOGP
from penstock.testing.train_process import RECIPE, TrainProcess, started

GROUPS_PER_STEP = 8
SERVICES = ("rollout", "prefill", "decode", "router", "worker", "reward", "trainer", "rank", "nats")
FREEZE_S = (2.0, 20.0)
"""Range of seconds, shorter and longer than leases (5 s) and the time after which prompts are redelivered (10 s)."""
STALL_S = 240.0
"""A run that trains no step for this many seconds hangs."""


@dataclass(slots=True)
class Faults:
    """Killed and frozen processes, and how long they were away. Times are of `time.monotonic`."""

    by_service: "collections.Counter[str]" = field(default_factory=collections.Counter)
    away_s: "dict[str, list[float]]" = field(default_factory=lambda: collections.defaultdict(list))
    """Seconds from the kill to the next process of that name, by service. Engines then still load for some seconds."""
    num_not_back: "collections.Counter[str]" = field(default_factory=collections.Counter)
    """Number still away at the end of the run, by service; the time until then counts as theirs."""
    away: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Killed process id and time of the kill, by name."""
    frozen_s: "dict[str, list[float]]" = field(default_factory=lambda: collections.defaultdict(list))
    """Seconds for which processes were stopped, by service."""

    def add(self, name: str, pid: int, now: float) -> None:
        """Note that the process of that name was killed. Call `look` with the same processes before."""
        self.by_service[_service(name)] += 1
        self.away.setdefault(name, (pid, now))

    def look(self, processes: Mapping[str, int], now: float) -> None:
        """Note the processes that are back."""
        for name, (old_pid, since) in list(self.away.items()):
            if processes.get(name, old_pid) != old_pid:
                self.away_s[_service(name)].append(now - since)
                del self.away[name]

    def end(self, now: float) -> None:
        """End the run: no process will come back."""
        for name, (_, since) in self.away.items():
            self.away_s[_service(name)].append(now - since)
            self.num_not_back[_service(name)] += 1
        self.away.clear()


def main() -> int:
    """Return 0 if no group was lost."""
    arguments = parse()
    exit_on_sigterm()
    num_steps = (arguments.kills + arguments.freezes + 2) * arguments.steps_between
    services = {*SERVICES} - {*arguments.spare}
    settings = {
        "trainer.num_steps": num_steps,
        "trainer.groups_per_step": GROUPS_PER_STEP,
        "trainer.samples_per_group": 4,
        "trainer.checkpoint_every": 5,
        "trainer.ranks": arguments.ranks,
        "rollout.replicas": arguments.replicas,
        "rollout.prefill": arguments.prefill,
        "rollout.decode": arguments.decode,
        "run.seed": arguments.seed,
        "trainer.weight_sync.transport": arguments.transport,
    }
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        folder = arguments.runs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        cluster = LocalCluster()
        if arguments.nats_servers > 1:
            cluster = stack.enter_context(local_cluster(folder / "cluster", size=arguments.nats_servers))
            settings |= {"bus.url": cluster.url, "bus.replicas": arguments.nats_servers}
        overrides = [f"--{key}={value}" for key, value in {**settings, "run.dir": folder / "runs"}.items()]
        begun = time.monotonic()
        with started(folder, arguments.recipe, *overrides) as train:
            faults = break_at_random(train, cluster, services, arguments, num_steps=num_steps)
            exit_code = train.wait(STALL_S + 5.0 * num_steps)
            wall_s = time.monotonic() - begun
            num_wanted = arguments.kills + arguments.freezes
            return tell(train, faults, exit_code, num_steps=num_steps, num_wanted_faults=num_wanted, wall_s=wall_s)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default=str(RECIPE), help="its name, or a file; default: tiny-cpu")
    parser.add_argument("--kills", type=int, default=50, help="kill -9")
    parser.add_argument("--freezes", type=int, default=50, help="SIGSTOP for 2 to 20 s")
    parser.add_argument("--steps-between", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=1, help="engines that both prefill and decode")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer; those that it starts are victims too")
    parser.add_argument("--spare", nargs="*", default=[], choices=SERVICES, help="leave these alone")
    parser.add_argument("--nats-servers", type=int, default=1, choices=(1, 3, 5), help="with more, all store the run")
    parser.add_argument("--transport", default="auto", help="trainer.weight_sync.transport")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=new_folder, help="new folder for the runs; default: one that is removed")
    return parser.parse_args()


def break_at_random(
    train: TrainProcess, cluster: LocalCluster, services: set[str], arguments: argparse.Namespace, *, num_steps: int
) -> Faults:
    """Kill and freeze the wanted number of processes, one after the other, at random moments of the run; fewer if it
    ends before."""
    draw = random.Random(arguments.seed)
    faults, due, latest, back_at = Faults(), 0, 0, dict[str, float]()

    def last_step() -> int:
        return max((row["step"] for row in train.rows()[-1:]), default=0)

    def all_processes() -> dict[str, int]:
        for name in [name for name, at in back_at.items() if time.monotonic() >= at]:
            del back_at[name]
            cluster.named(name).start()
        running = {server.name: server.pid for server in cluster.servers if server.process is not None}
        return {**train.processes(), **running}

    def look() -> None:
        faults.look(all_processes(), time.monotonic())

    def has_ended() -> bool:
        return train.process.poll() is not None

    def is_due() -> bool:
        look()
        return last_step() >= due or has_ended()

    def steps_run_out() -> bool:
        return last_step() >= latest

    def nobody_is_away() -> bool:
        look()
        return has_ended() or not faults.away

    kinds = ["kill"] * arguments.kills + ["freeze"] * arguments.freezes
    draw.shuffle(kinds)
    for number, kind in enumerate(kinds, start=1):
        due = number * arguments.steps_between
        train.wait_until(is_due, f"step {due}", STALL_S)
        time.sleep(draw.random())  # somewhere in the step, not at its end
        processes = {name: pid for name, pid in all_processes().items() if _service(name) in services}
        faults.look(processes, time.monotonic())
        if has_ended() or not processes:
            _say(f"the run ended after step {last_step()}, before fault {number}")
            break
        present = sorted({_service(name) for name in processes})
        service = draw.choice(present)
        name = draw.choice(sorted(name for name in processes if _service(name) == service))
        step = last_step()
        if kind == "kill":
            if service == "nats" and cluster.servers:
                server = cluster.named(name)
                server.kill()
                back_at[name] = time.monotonic() + draw.uniform(*FREEZE_S)
            else:
                os.kill(processes[name], signal.SIGKILL)
            faults.add(name, processes[name], time.monotonic())
            _say(f"{number}/{len(kinds)}: killed {name} after step {step}")
        else:
            # The faults to come get half of the steps that they would have had, at least.
            latest = num_steps - arguments.steps_between * (1 + (len(kinds) - number + 1) // 2)
            seconds = freeze(processes[name], draw.uniform(*FREEZE_S), look, until=steps_run_out)
            faults.frozen_s[service].append(seconds)
            _say(f"{number}/{len(kinds)}: froze {name} for {seconds:.1f} s after step {step}")
    train.wait_until(nobody_is_away, "the last to be back", STALL_S)
    faults.end(time.monotonic())
    return faults


def freeze(pid: int, seconds: float, look: Callable[[], None], *, until: Callable[[], bool]) -> float:
    """Stop a process and all its descendants for `seconds`, or `until` something holds, and `look` meanwhile.

    Those that end are no error. Returns the seconds.
    """
    try:
        stopped = [psutil.Process(pid)]
        stopped += stopped[0].children(recursive=True)
    except psutil.NoSuchProcess:
        return 0.0
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    begun = time.monotonic()
    while (rest_s := begun + seconds - time.monotonic()) > 0 and not until():
        time.sleep(min(rest_s, 0.2))
        look()
    frozen_s = time.monotonic() - begun
    for process in reversed(stopped):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    return frozen_s


def tell(
    train: TrainProcess, faults: Faults, exit_code: int, *, num_steps: int, num_wanted_faults: int, wall_s: float
) -> int:
    """Print the table; return 0 if every bar holds."""
    rows = train.rows()
    trained = collections.Counter(index for row in rows for index in row["groups"])
    num_wanted = num_steps * GROUPS_PER_STEP
    same_version = [row["dlogp_max_current"] for row in rows if "dlogp_max_current" in row]
    _say("\n| service | kills | away s, median, longest | still away at the end | freezes | frozen s, together |")
    _say("|---|---|---|---|---|---|")
    for service in sorted({*faults.by_service, *faults.frozen_s}):
        away_s, frozen_s = sorted(faults.away_s[service]), faults.frozen_s[service]
        away = f"{away_s[len(away_s) // 2]:.1f}, {away_s[-1]:.1f}" if away_s else "-"
        _say(
            f"| {service} | {faults.by_service[service]} | {away} | {faults.num_not_back[service]} | {len(frozen_s)} | "
            f"{sum(frozen_s):.0f} |"
        )
    last: dict[str, Any] = rows[-1] if rows else {}
    num_kills, num_freezes = faults.by_service.total(), sum(map(len, faults.frozen_s.values()))
    num_faults = num_kills + num_freezes
    left_behind = train.left_behind()
    checks = {
        "run finished": (
            exit_code == 0 and len(rows) == num_steps,
            f"exit {exit_code}, {len(rows)} of {num_steps} steps",
        ),
        "faults": (num_faults == num_wanted_faults, f"{num_faults} of {num_wanted_faults}"),
        "groups lost": (len(trained) == num_wanted, f"{num_wanted - len(trained)} of {num_wanted}"),
        "groups trained twice": (max(trained.values(), default=0) == 1, f"{sum(trained.values()) - len(trained)}"),
        "trained beyond the staleness bound": _count(row["staleness_max"] > row["max_staleness"] for row in rows),
        "groups failed": (last.get("num_failed_groups") == 0, str(last.get("num_failed_groups"))),
        "versions used twice": _count(
            one["policy_version"] >= next_one["policy_version"] for one, next_one in itertools.pairwise(rows)
        ),
        "max |dlogp| where no version lies between": (
            bool(same_version) and all(value < MAX_DLOGP for value in same_version),
            f"{max(same_version):.1e} in {len(same_version)} steps" if same_version else "measured in no step",
        ),
        "processes left": (not left_behind, str(len(left_behind))),
    }
    _say("\n| what | seen | |\n|---|---|---|")
    for what, (holds, seen) in checks.items():
        _say(f"| {what} | {seen} | {'holds' if holds else 'FAILS'} |")
    _say(
        f"\n{num_kills} kills and {num_freezes} freezes in {wall_s:.0f} s; played again: "
        f"{last.get('num_stale_groups')} stale groups, {last.get('num_lost_groups')} lost by the bus"
    )
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
