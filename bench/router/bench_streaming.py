"""The trainer's waits in a step: with backward as groups arrive or after the last, and with slow pushes.

    python bench/router/bench_streaming.py                       # about three minutes
    python bench/router/bench_streaming.py --rollout 0.5 0.8     # other loads, too

Loop, ledger and batch selection are the real ones. Rollouts, the computing of groups, pushes and checkpoint files are
sleeps, so processor load hardly matters. Groups have log-normal durations; all slots together play a batch in
`--rollout` of the time in which the trainer computes one. A push of half a step brings the weights to all slots at its
end (as a broadcast does), or to one after another (as the other transports do); meanwhile all generate. The copy of the
weights before a push, which a run counts in `push_wait_s`, takes no time here.

New weights cannot be sampled before a slot has them. So with a slow push groups begin later but must be trained by the
same version; slow groups then become stragglers for which the bound on staleness makes the trainer wait. *best* is the
cost of that alone: the same durations in an event simulation in which only rollouts, computing and the push take time
(bench/async_loop/perfect_loop.py).

Bars, with backward as groups arrive: exposed pushes and checkpoints are at most 3% of a step, without that copy and
without waiting for groups that a push made late, which is `wait_s` and shows in the length of steps; a push of half a
step lengthens steps by at most 5% more than it lengthens the best. The exit code is 1 if one fails.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.async_loop.perfect_loop import Push, step_ends
from bench.async_loop.workload import Scenario, Workload
from penstock.runtime.process import end_task
from services.trainer.admission.gate import Gate
from services.trainer.admission.group_state import Arrival
from services.trainer.admission.ledger import GroupLedger
from services.trainer.backend.base import Measure
from services.trainer.config import TrainerConfig
from services.trainer.flow.batch_source import BatchSource
from services.trainer.flow.changes import Changes
from services.trainer.flow.crash_record import CrashRecord
from services.trainer.loop import TrainingLoop
from services.trainer.position import Position
from services.trainer.step_computation import StepComputation
from services.trainer.telemetry.progress import Progress
from services.trainer.weight_sync.push_report import PushReport

GROUPS_PER_STEP = 32
GROUP_S = 0.03
"""Seconds to compute the gradient of a group."""
CHUNK_S = 0.01
"""Further seconds for each chunk: rows that are packed separately, and the sum of gradients."""
UPDATE_S = 0.04
CHECKPOINT_S = 0.5
CHECKPOINT_EVERY = 5
COMPUTE_S = GROUPS_PER_STEP * GROUP_S + CHUNK_S + UPDATE_S
NUM_SLOTS = 24
SIGMA = 0.7
"""Standard deviation of the logarithm of a group's duration."""
NUM_WARMUP = 4
NUM_BEST = 200
"""Number of steps in the mean of the best; over 30 it still depends on the groups drawn."""
PUSHES = {
    "none": Push(),
    "half a step, all at its end": Push(total_s=COMPUTE_S / 2),
    "half a step, one by one": Push(total_s=COMPUTE_S / 2, rolls=True),
}
MAX_SLOWDOWN, MAX_EXPOSED = 1.05, 0.03
UNUSED: Any = None


def rollout_s(index: int, mean_s: float) -> float:
    """Return the seconds for which a group is played."""
    return mean_s * random.Random(index).lognormvariate(-(SIGMA**2) / 2, SIGMA)


@dataclass(frozen=True, kw_only=True)
class Durations(Workload):
    """The same groups for the event simulation, where each is one sample."""

    mean_s: float
    seed: int = 0
    samples_per_group: int = 1
    median_tokens: float = 0.0
    sigma: float = SIGMA
    max_tokens: int = 1
    token_s: float = 0.0
    train_token_s: float = 0.0
    train_fixed_s: float = UPDATE_S

    def num_tokens(self, index: int) -> tuple[int, ...]:
        """Return one token: times do not depend on tokens here."""
        return (1,)

    def sample_s(self, index: int) -> list[float]:
        """Return the seconds in a slot."""
        return [rollout_s(index, self.mean_s)]

    def train_s(self, index: int) -> float:
        """Return the seconds of computing."""
        return GROUP_S


def best_step_s(mean_s: float, *, max_staleness: int, streams: bool, push: Push) -> float:
    """Return the mean step of a loop in which nothing else takes time."""
    pool = Scenario(
        replicas=NUM_SLOTS, slots_per_replica=1, groups_per_step=GROUPS_PER_STEP, workload=Durations(mean_s=mean_s)
    )
    num_steps = NUM_WARMUP + NUM_BEST
    ends = step_ends(pool, max_staleness=max_staleness, num_steps=num_steps, streams=streams, push=push)
    return (ends[-1] - ends[NUM_WARMUP - 1]) / NUM_BEST


class SleepingBackend:
    """A backend whose steps take as long as the constants say."""

    def begin_step(self, policy_version: int) -> None:
        """Take no time."""

    def accumulate(self, groups: Sequence[Any]) -> None:
        """Take as long as these groups do."""
        time.sleep(CHUNK_S + GROUP_S * len(groups))

    def finish_step(self) -> Measure:
        """Take as long as an update does."""
        time.sleep(UPDATE_S)
        return lambda: {"num_tokens": 1.0, "num_groups": 1.0, "num_groups_without_gradient": 0.0, "grad_norm": 1.0}

    def abort_step(self) -> None:
        """Take no time."""


@dataclass
class Rollouts:
    """Plays admitted groups, one in each slot, in slots that hold the version of the group's admission or a newer
    one.
    """

    ledger: GroupLedger[Any, Any]
    position: Position
    changes: Changes
    mean_s: float
    """Mean seconds of a group."""
    tasks: asyncio.TaskGroup
    versions: list[int] = field(default_factory=lambda: [1] * NUM_SLOTS)
    """Version of each slot."""
    free: set[int] = field(default_factory=lambda: set(range(NUM_SLOTS)))
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """Index and version at admission of groups without a slot."""
    num_unsent: int = 0
    """Groups are admitted and sent at once."""

    def wake(self) -> None:
        """Admit groups, and begin to play them."""
        version = self.position.admission_version
        assert version is not None
        while self.ledger.num_admissible(self.position.num_steps_left, num_steps_ahead=self.position.num_steps_ahead):
            self.waiting.append((self.ledger.admit(version).index, version))
        while self.waiting and self.free:
            index, oldest = self.waiting[0]
            able = [slot for slot in self.free if self.versions[slot] >= oldest]
            if not able:
                return
            self.waiting.popleft()
            slot = min(able, key=lambda slot: (self.versions[slot], slot))
            self.free.remove(slot)
            self.tasks.create_task(self._play(index, slot))

    async def _play(self, index: int, slot: int) -> None:
        version = self.versions[slot]
        await asyncio.sleep(rollout_s(index, self.mean_s))
        played = SimpleNamespace(id=SimpleNamespace(message=f"run/{index}/0/epoch"))
        ready = SimpleNamespace(index=index, sequences=(range(1),))
        group = SimpleNamespace(ready=ready, images={}, played=played, received_at=time.monotonic())
        self.ledger.hold(
            Arrival(index=index, attempt=0, oldest_version=version, newest_version=version, num_tokens=1, group=group)
        )
        self.free.add(slot)
        self.wake()
        self.changes.notify()


@dataclass
class SlowPublication:
    """A push that takes time, followed by the announcement."""

    position: Position
    rollouts: Rollouts
    push: Push

    async def publish(self, version: int, _: Any) -> PushReport:
        """Bring the version to the slots, and admit groups when half of them have it."""
        began = time.monotonic()
        for slot in range(NUM_SLOTS):
            due_s = self.push.total_s * ((slot + 1) / NUM_SLOTS if self.push.rolls else 1.0)
            await asyncio.sleep(max(0.0, began + due_s - time.monotonic()))
            self.rollouts.versions[slot] = version
            if 2 * (slot + 1) >= NUM_SLOTS:
                self.position.served_version = version
            self.rollouts.wake()
        self.position.announced_version = version
        push_s = time.monotonic() - began
        return PushReport(version=version, num_replicas=1, num_failed=0, num_bytes=0, push_s=push_s)


class SlowCheckpoints:
    """Checkpoint files that take time to write."""

    saved_version: int | None = None
    write_s: float | None = None

    def moment(self, position: Position, _: Any = UNUSED) -> SimpleNamespace:
        """Return step and version."""
        return SimpleNamespace(step=position.step, version=position.version)

    async def write(self, _: SimpleNamespace, *, on_copied: Callable[[], None] | None) -> None:
        """Sleep. Nothing is copied, so that the next update waits for the end, as on one rank."""
        await asyncio.sleep(CHECKPOINT_S)

    async def settle(self, moment: SimpleNamespace) -> None:
        """Record the moment."""
        self.saved_version = moment.version


class Loop(TrainingLoop):
    """The loop without weights and without records of groups."""

    async def _copy_weights(self) -> Any:
        return SimpleNamespace(version=self.position.version)

    def _describe(self, _: Sequence[Any]) -> dict[str, Any]:
        return {}


async def run(
    folder: Path, *, streams: bool, push: Push, max_staleness: int, mean_s: float, num_steps: int
) -> list[dict[str, float]]:
    """Return the rows of metrics of a run, without its first steps."""
    folder.mkdir()  # noqa: ASYNC240 - nothing else runs yet
    ledger: GroupLedger[Any, Any] = GroupLedger(Gate(max_staleness=max_staleness, groups_per_step=GROUPS_PER_STEP))
    position = Position(num_steps=num_steps, step=0, version=1, announced_version=1)
    changes, rows = Changes(), list[dict[str, float]]()
    backend: Any = SleepingBackend()
    crashes = CrashRecord(folder / "in_hand.json", run_id="run", is_resumed=False)
    async with asyncio.TaskGroup() as tasks:
        rollouts = Rollouts(ledger, position, changes, mean_s, tasks)
        loop = Loop(
            config=TrainerConfig(checkpoint_every=CHECKPOINT_EVERY),
            folder=folder,
            progress=Progress(run_id="run", num_steps=num_steps),
            position=position,
            backend=backend,
            computation=StepComputation(backend=backend, crashes=crashes, recorder=None),
            publisher=SimpleNamespace(num_live_replicas=1),  # type: ignore[arg-type]
            publication=SlowPublication(position, rollouts, push),  # type: ignore[arg-type]
            ledger=ledger,
            feeder=UNUSED,
            collector=UNUSED,
            batches=BatchSource(
                ledger=ledger,
                feeder=rollouts,  # type: ignore[arg-type]
                collector=UNUSED,
                changes=changes,
                position=position,
                streak=UNUSED,
                streams=streams,
            ),
            checkpoints=SlowCheckpoints(),  # type: ignore[arg-type]
            metrics=SimpleNamespace(write=rows.append),  # type: ignore[arg-type]
            trace=SimpleNamespace(write=lambda *_: None),  # type: ignore[arg-type]
            trackers=SimpleNamespace(log=lambda _: None),  # type: ignore[arg-type]
        )
        rollouts.wake()
        training = tasks.create_task(loop._train_until(asyncio.Event(), tasks))
        await training
        await end_task(training)
    return rows[NUM_WARMUP:-1]


def mean(rows: Sequence[dict[str, float]], name: str) -> float:
    """Return the mean over steps."""
    return statistics.fmean(row[name] for row in rows)


async def main() -> int:
    """Print the table; return 0 if no bar fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rollout", type=float, nargs="+", default=[0.5])
    arguments = parser.parse_args()
    columns = "rollout", "max_staleness", "backward", "push", "step", "longer by", "best", "longer by", "groups"
    sys.stdout.write(f"computing: {COMPUTE_S:.2f} s a step; times in s\n\n")
    sys.stdout.write(f"| {' | '.join((*columns, 'push', 'checkpoint', 'idle'))} |\n|{'---|' * (len(columns) + 3)}\n")
    has_failed = False
    for share in arguments.rollout:
        for max_staleness in (1, 2):
            for streams in (False, True):
                has_failed |= await compare(share, max_staleness, streams=streams, num_steps=arguments.steps)
    return int(has_failed)


async def compare(share: float, max_staleness: int, *, streams: bool, num_steps: int) -> bool:
    """Print a line for each kind of push, of runs side by side; return whether a bar fails."""
    mean_s = share * COMPUTE_S * NUM_SLOTS / GROUPS_PER_STEP
    with tempfile.TemporaryDirectory() as folder:
        runs = await asyncio.gather(
            *(
                run(
                    Path(folder) / str(number),
                    streams=streams,
                    push=push,
                    max_staleness=max_staleness,
                    mean_s=mean_s,
                    num_steps=num_steps,
                )
                for number, push in enumerate(PUSHES.values())
            )
        )
    steps_s = [mean(rows, "step_s") for rows in runs]
    bests_s = [best_step_s(mean_s, max_staleness=max_staleness, streams=streams, push=push) for push in PUSHES.values()]
    exposed = 0.0
    for name, rows, step_s, best_s in zip(PUSHES, runs, steps_s, bests_s, strict=True):
        waits_s = [mean(rows, each) for each in ("wait_s", "push_wait_s", "checkpoint_wait_s")]
        exposed = max(exposed, (waits_s[1] + waits_s[2]) / step_s)
        cells = [f"{share:.1f}", str(max_staleness), "as groups come" if streams else "at the end", name]
        cells += [f"{step_s:.3f}", f"{step_s / steps_s[0] - 1:.1%}", f"{best_s:.3f}", f"{best_s / bests_s[0] - 1:.1%}"]
        cells += [f"{each:.3f}" for each in waits_s] + [f"{mean(rows, 'trainer_idle_fraction'):.1%}"]
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()
    slowdown = max(step_s / steps_s[0] / (best_s / bests_s[0]) for step_s, best_s in zip(steps_s, bests_s, strict=True))
    return streams and (exposed > MAX_EXPOSED or slowdown > MAX_SLOWDOWN)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
