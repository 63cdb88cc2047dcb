"""A trainer's collector, batches and step, in processes that one group kills.

    python -m tests.support.trainer.runs.dying_trainer URL RUN FOLDER reading|training|waiting NUM_STARTS

Starts that many, one after the other, and prints the exit code of each. A process dies by SIGKILL when it reads group
0, or trains a batch with it, or, once, when it has computed a group of a batch and waits for the other. Otherwise it
trains one batch of two groups and prints {"batch": its groups, "num_failed": groups that were given up}.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.bus.buckets.lock import claim
from penstock.bus.connection import connect
from penstock.bus.image_store import ImageStore
from penstock.bus.work_queue.consumer import Delivery, consuming
from penstock.config import BusConfig
from penstock.records import Group
from penstock.runtime.process import end_task
from services.trainer.admission.config import FilterConfig
from services.trainer.admission.gate import Gate
from services.trainer.admission.ledger import GroupLedger
from services.trainer.backend.base import Measure
from services.trainer.batching.sequences import GroupReader, ModelTokens, TrainGroup
from services.trainer.flow.batch_source import BatchSource
from services.trainer.flow.changes import Changes
from services.trainer.flow.collector import Collector, Finished
from services.trainer.flow.crash_record import CrashRecord
from services.trainer.flow.failure_streak import FailureStreak
from services.trainer.flow.filter_tally import FilterTally
from services.trainer.position import Position
from services.trainer.telemetry.step_metrics import StepClock
from tests.support.trainer.runs.training_loops import training_loop
from tests.support.waiting import wait_until

DEADLY = 0
NUM_GROUPS = 4


def die() -> None:
    """As the kernel's OOM killer does it."""
    os.kill(os.getpid(), signal.SIGKILL)


class DeadlyReader(GroupReader):
    """Reading group 0 kills."""

    def read(self, group: Group, images: Mapping[str, bytes]) -> TrainGroup:
        """Read any other group."""
        if group.id.index == DEADLY:
            die()
        return super().read(group, images)


class DeadlyBackend:
    """Training group 0 kills, when all groups of the bus have been read."""

    def __init__(self, ledger: "GroupLedger[Finished, Delivery]", *, is_deadly: bool) -> None:
        """Look at `ledger`."""
        self._ledger = ledger
        self._is_deadly = is_deadly
        self.num_groups = 0

    def begin_step(self, policy_version: int) -> None:
        """Take any."""

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        """Train any other group."""
        self.num_groups += len(groups)
        if self._is_deadly and any(group.index == DEADLY for group in groups):
            wait_until(lambda: self._ledger.num_receipts >= NUM_GROUPS)
            die()

    def finish_step(self) -> Measure:
        """Measure what the loop looks at."""
        return lambda: {"num_groups": 2.0, "num_groups_without_gradient": 0.0, "grad_norm": 1.0}


async def main(url: str, run: str, folder: Path, mode: str) -> None:
    """Train one batch."""
    async with connect(BusConfig(url=url), run=run) as bus:
        tokens = ModelTokens(vocab_size=512, image_id=None, forbidden_ids=frozenset())
        ledger: GroupLedger[Finished, Delivery] = GroupLedger(Gate(max_staleness=0, groups_per_step=2))
        streak = FailureStreak(max_in_a_row=1)
        crashes = CrashRecord(folder / "in_hand.json", run_id="run", is_resumed=True)
        lock = await claim(bus, "trainer", ttl_s=0.0)
        images = ImageStore(bus)
        await images.ensure()

        position = Position(num_steps=10, step=1, version=1, announced_version=1)
        changes = Changes()

        backend = DeadlyBackend(ledger, is_deadly=mode == "training")
        death = folder / "death"

        def admit() -> None:
            if mode == "waiting" and backend.num_groups == 1 and not death.exists():
                death.touch()
                die()
            while ledger.num_admissible(position.num_steps_left):
                ledger.admit(position.version)
                changes.notify()

        feeder: Any = SimpleNamespace(wake=admit, num_unsent=0)
        async with consuming(bus, bus.groups, "trainer", ack_wait_s=60.0, max_ack_pending=100, fresh=True) as consumer:
            collector = Collector(
                consumer=consumer,
                ledger=ledger,
                changes=changes,
                reader=DeadlyReader(tokens, None) if mode == "reading" else GroupReader(tokens, None),
                lock=lock,
                images=images,
                run_id="run",
                trainer_epoch="a",
                streak=streak,
                crashes=crashes,
                filters=FilterConfig(),
                tally=FilterTally(max_share=1.0),
                temperature=1.0,
            )
            batches = BatchSource(
                ledger=ledger,
                feeder=feeder,
                collector=collector,
                changes=changes,
                position=position,
                streak=streak,
                streams=mode == "waiting",
            )
            loop = training_loop(folder, batches=batches, backend=backend, crashes=crashes)
            async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
                collecting = tasks.create_task(collector.run())
                batch = await loop._compute_batch(asyncio.Event(), StepClock())
                assert batch is not None
                await loop._update(batch, None)
                await end_task(collecting)
            trained = sorted(finished.ready.index for finished in batch)
            sys.stdout.write(json.dumps({"batch": trained, "num_failed": ledger.counts.failed}) + "\n")


def start(url: str, run: str, folder: Path, mode: str) -> int:
    """Fork, which is quicker than to import everything anew, and return the exit code."""
    pid = os.fork()
    if pid == 0:
        asyncio.run(main(url, run, folder, mode))
        sys.stdout.flush()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    codes = [start(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]) for _ in range(int(sys.argv[5]))]
    sys.stdout.write(json.dumps(codes) + "\n")
