"""What the trainer waits for in a step: with backward as groups come or after the last, and with slow pushes.

    python bench/bench_streaming.py                       # about two minutes
    python bench/bench_streaming.py --rollout 0.5 0.8     # other loads, too

Loop, ledger and batch selection are the real ones. Rollouts, the computing of groups, pushes and checkpoint files are
sleeps, so processor load hardly matters. Groups have log-normal durations; all slots together play a batch in
`--rollout` of the time in which the trainer computes one.

Bars, with backward as groups come: exposed pushes and checkpoints are at most 3% of a step; with max_staleness 2 a push
of half a step makes steps at most 5% longer. With 1, or with slower rollouts, groups that are admitted half a step
later become stragglers that the bound on staleness makes the trainer wait for. The exit code is 1 if a bar fails.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from penstock.runtime.process import end_task  # noqa: E402
from services.trainer.admission.gate import Gate  # noqa: E402
from services.trainer.admission.group_state import Arrival  # noqa: E402
from services.trainer.admission.ledger import GroupLedger  # noqa: E402
from services.trainer.config import TrainerConfig  # noqa: E402
from services.trainer.flow.batch_source import BatchSource  # noqa: E402
from services.trainer.flow.changes import Changes  # noqa: E402
from services.trainer.flow.crash_record import CrashRecord  # noqa: E402
from services.trainer.loop import TrainingLoop  # noqa: E402
from services.trainer.position import Position  # noqa: E402
from services.trainer.telemetry.progress import Progress  # noqa: E402
from services.trainer.weight_sync.publisher import PushReport  # noqa: E402

GROUPS_PER_STEP = 32
GROUP_S = 0.03
"""To compute the gradient of a group."""
CHUNK_S = 0.01
"""More for each chunk: rows that are packed by themselves, and the sum of gradients."""
UPDATE_S = 0.04
CHECKPOINT_S = 0.5
CHECKPOINT_EVERY = 5
COMPUTE_S = GROUPS_PER_STEP * GROUP_S + CHUNK_S + UPDATE_S
NUM_SLOTS = 24
SIGMA = 0.7
"""Standard deviation of the logarithm of a group's duration."""
NUM_WARMUP = 4
MAX_SLOWDOWN, MAX_EXPOSED = 1.05, 0.03
UNUSED: Any = None


class SleepingBackend:
    """Takes as long as the constants say."""

    def begin_step(self, policy_version: int) -> None:
        """Take no time."""

    def accumulate(self, groups: Sequence[Any]) -> None:
        """Take as long as these groups do."""
        time.sleep(CHUNK_S + GROUP_S * len(groups))

    def finish_step(self) -> dict[str, float]:
        """Take as long as an update does."""
        time.sleep(UPDATE_S)
        return {"num_tokens": 1.0, "num_groups": 1.0, "num_groups_without_gradient": 0.0, "grad_norm": 1.0}

    def abort_step(self) -> None:
        """Take no time."""


@dataclass
class Rollouts:
    """Plays what the gate lets in, `NUM_SLOTS` groups at a time."""

    ledger: GroupLedger[Any, Any]
    position: Position
    changes: Changes
    mean_s: float
    """Of a group."""
    tasks: asyncio.TaskGroup
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(NUM_SLOTS))

    def wake(self) -> None:
        """Admit groups, and begin to play them."""
        announced = self.position.announced_version
        assert announced is not None
        while self.ledger.num_admissible(self.position.num_steps_left, num_steps_ahead=self.position.num_steps_ahead):
            self.tasks.create_task(self._play(self.ledger.admit(announced).index))

    async def _play(self, index: int) -> None:
        mean_log = -(SIGMA**2) / 2
        async with self.slots:
            version = self.position.announced_version or 0
            await asyncio.sleep(self.mean_s * random.Random(index).lognormvariate(mean_log, SIGMA))
        group = SimpleNamespace(ready=SimpleNamespace(index=index), images={}, played=UNUSED)
        self.ledger.hold(
            Arrival(index=index, attempt=0, oldest_version=version, newest_version=version, num_tokens=1, group=group)
        )
        self.changes.notify()


@dataclass
class SlowPublication:
    """A push that takes a time, and then the announcement."""

    position: Position
    rollouts: Rollouts
    push_s: float

    async def publish(self, version: int, _: Any) -> PushReport:
        """Sleep, and let groups in."""
        await asyncio.sleep(self.push_s)
        self.position.announced_version = version
        self.rollouts.wake()
        return PushReport(version=version, num_replicas=1, num_failed=0, num_bytes=0, push_s=self.push_s, pause_s=0.0)


class SlowCheckpoints:
    """Files that take a time to write."""

    saved_version: int | None = None
    write_s: float | None = None

    def moment(self, position: Position, _: Any = UNUSED) -> int:
        """The version."""
        return position.version

    async def write(self, _: int) -> None:
        """Sleep."""
        await asyncio.sleep(CHECKPOINT_S)

    async def settle(self, moment: int) -> None:
        """Note it."""
        self.saved_version = moment


class Loop(TrainingLoop):
    """The loop without weights and without records of groups."""

    async def _copy_weights(self) -> Any:
        return SimpleNamespace(version=self.position.version)

    def _describe(self, _: Sequence[Any]) -> dict[str, Any]:
        return {}

    def _write_samples(self, finished: Any, step: int) -> None:
        pass


async def run(
    folder: Path, *, streams: bool, push_s: float, max_staleness: int, rollout_share: float, num_steps: int
) -> list[dict[str, float]]:
    """Return the rows of metrics of a run, without its first steps."""
    ledger: GroupLedger[Any, Any] = GroupLedger(Gate(max_staleness=max_staleness, groups_per_step=GROUPS_PER_STEP))
    position = Position(num_steps=num_steps, step=0, version=1, announced_version=1)
    changes, rows = Changes(), list[dict[str, float]]()
    async with asyncio.TaskGroup() as tasks:
        mean_s = rollout_share * COMPUTE_S * NUM_SLOTS / GROUPS_PER_STEP
        rollouts = Rollouts(ledger, position, changes, mean_s, tasks)
        loop = Loop(
            config=TrainerConfig(checkpoint_every=CHECKPOINT_EVERY),
            folder=folder,
            progress=Progress(run_id="run", num_steps=num_steps),
            position=position,
            backend=SleepingBackend(),  # type: ignore[arg-type]
            publisher=SimpleNamespace(num_live_replicas=1),  # type: ignore[arg-type]
            publication=SlowPublication(position, rollouts, push_s),  # type: ignore[arg-type]
            ledger=ledger,
            feeder=UNUSED,
            collector=UNUSED,
            crashes=CrashRecord(folder / "in_hand.json", run_id="run", is_resumed=False),
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
            trackers=SimpleNamespace(log=lambda _: None),  # type: ignore[arg-type]
            recorder=None,
        )
        rollouts.wake()
        training = tasks.create_task(loop._train_until(asyncio.Event(), tasks))
        await training
        await end_task(training)
    return rows[NUM_WARMUP:-1]


def mean(rows: Sequence[dict[str, float]], name: str) -> float:
    """Over steps."""
    return statistics.fmean(row[name] for row in rows)


async def main() -> int:
    """Print the table; return 0 if no bar fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rollout", type=float, nargs="+", default=[0.5])
    arguments = parser.parse_args()
    columns = "rollout", "max_staleness", "backward", "push", "step", "groups", "push", "checkpoint", "idle"
    sys.stdout.write(f"computing: {COMPUTE_S:.2f} s a step; times in s\n\n")
    sys.stdout.write(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n")
    has_failed = False
    for share in arguments.rollout:
        for max_staleness in (1, 2):
            for streams in (False, True):
                has_failed |= await compare(share, max_staleness, streams=streams, num_steps=arguments.steps)
    return int(has_failed)


async def compare(share: float, max_staleness: int, *, streams: bool, num_steps: int) -> bool:
    """Print two lines, of runs side by side without and with slow pushes; return whether a bar fails."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        pushes = (0.0, COMPUTE_S / 2)
        runs = await asyncio.gather(
            *(
                run(
                    Path(folder),
                    streams=streams,
                    push_s=push_s,
                    max_staleness=max_staleness,
                    rollout_share=share,
                    num_steps=num_steps,
                )
                for push_s, folder in zip(pushes, (first, second), strict=True)
            )
        )
    exposed = 0.0
    for push_s, rows in zip(pushes, runs, strict=True):
        parts = [mean(rows, name) for name in ("step_s", "wait_s", "push_wait_s", "checkpoint_wait_s")]
        idle = mean(rows, "trainer_idle_fraction")
        exposed = max(exposed, (parts[2] + parts[3]) / parts[0])
        cells = [f"{share:.1f}", str(max_staleness), "as groups come" if streams else "at the end", f"{push_s:.2f}"]
        cells += [f"{part:.3f}" for part in parts] + [f"{idle:.1%}"]
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()
    slowdown = mean(runs[1], "step_s") / mean(runs[0], "step_s")
    return streams and (exposed > MAX_EXPOSED or (max_staleness > 1 and slowdown > MAX_SLOWDOWN))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
