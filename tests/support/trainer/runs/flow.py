"""The parts of a trainer between the bus and the batch."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bus.buckets.lock import claim
from penstock.bus.connection import Bus
from penstock.bus.image_store import ImageStore
from penstock.bus.work_queue.consumer import Delivery, consuming
from penstock.model.tokens import forbidden_token_ids, image_token_id
from penstock.records import Group, Sampling
from penstock.records.codec import encode
from penstock.runtime.process import end_task
from services.trainer.admission.config import FilterConfig
from services.trainer.admission.gate import Gate
from services.trainer.admission.ledger import GroupLedger
from services.trainer.admission.pools import RowPools
from services.trainer.batching.images import ImagePatcher
from services.trainer.batching.sequences import GroupReader, ModelTokens
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import Dataset, open_dataset
from services.trainer.flow.batch_source import BatchSource
from services.trainer.flow.changes import Changes
from services.trainer.flow.collector import Collector, Finished
from services.trainer.flow.crash_record import CrashRecord
from services.trainer.flow.failure_streak import FailureStreak
from services.trainer.flow.feeder import Feeder
from services.trainer.flow.filter_tally import FilterTally
from services.trainer.position import Position
from services.trainer.telemetry.step_metrics import StepClock
from tests.support.trainer.groups import IMAGES
from tests.support.waiting import HANG_S, until

RUN = "run"
"""The run id of `make_group`."""
NUM_STEPS = 100


@dataclass
class Flow:
    """The parts of a trainer between the bus and the batch."""

    bus: Bus
    ledger: GroupLedger[Finished, Delivery]
    collector: Collector
    feeder: Feeder
    batches: BatchSource
    position: Position

    def announce(self, version: int) -> None:
        """What the training loop does when the weights of `version` are pushed."""
        self.position.version = self.position.announced_version = version
        self.feeder.wake()

    async def next_batch(self, version: int) -> list[Finished]:
        """The batch that trains `version`, which is announced, within the time of a test."""
        self.announce(version)
        async with asyncio.timeout(HANG_S):
            return await self.batches.next_chunk(StepClock())

    async def settle(self) -> int:
        """What a checkpoint does; returns the number of messages that it acknowledged."""
        receipts = self.ledger.settle(self.ledger.checkpoint())
        for receipt in receipts:
            await receipt.ack()
        return len(receipts)


@asynccontextmanager
async def open_flow(
    bus: Bus,
    model_path: Path,
    *,
    max_staleness: int = 0,
    groups_per_step: int = 1,
    run_id: str = RUN,
    ack_wait_s: float = 60.0,
    patcher: ImagePatcher | None = None,
    filters: FilterConfig = FilterConfig(),  # noqa: B008 - it is frozen
    dataset: Dataset | None = None,
    pools: RowPools | None = None,
    state: dict[str, Any] | None = None,
    trainer_epoch: str = "a",
) -> AsyncIterator[Flow]:
    """Open what a trainer has at its start; everything unacknowledged is delivered again.

    `state` is the ledger's, from the checkpoint that the trainer starts from.
    """
    tokens = ModelTokens(
        vocab_size=512, image_id=image_token_id(model_path), forbidden_ids=frozenset(forbidden_token_ids(model_path))
    )
    gate = Gate(max_staleness=max_staleness, groups_per_step=groups_per_step)
    ledger: GroupLedger[Finished, Delivery] = (
        GroupLedger(gate) if state is None else GroupLedger.from_state(state, gate)
    )
    position = Position(num_steps=NUM_STEPS, step=0, version=0)
    changes, tally, sampling = Changes(), FilterTally(max_share=filters.max_filtered_share), Sampling(temperature=1.0)
    images = ImageStore(bus)
    await images.ensure()
    feeder = Feeder(
        dataset=dataset or open_dataset(DataConfig()),
        ledger=ledger,
        position=position,
        changes=changes,
        tally=tally,
        bus=bus,
        images=images,
        sampling=sampling,
        run_id=run_id,
        trainer_epoch=trainer_epoch,
        samples_per_group=4,
        pools=pools,
    )
    streak = FailureStreak(max_in_a_row=2)
    consumer = consuming(bus, bus.groups, "trainer", ack_wait_s=ack_wait_s, max_ack_pending=1000, fresh=True)
    folder = Path(tempfile.mkdtemp())
    try:
        async with consumer as groups:
            collector = Collector(
                consumer=groups,
                ledger=ledger,
                changes=changes,
                reader=GroupReader(tokens, patcher),
                lock=await claim(bus, "trainer", ttl_s=0.0),
                images=images,
                run_id=run_id,
                trainer_epoch=trainer_epoch,
                streak=streak,
                crashes=CrashRecord(folder / "in_hand.json", run_id="run", is_resumed=False),
                filters=filters,
                tally=tally,
                temperature=sampling.temperature,
                pools=pools,
                on_received=feeder.wake,
            )
            batches = BatchSource(
                ledger=ledger,
                feeder=feeder,
                collector=collector,
                changes=changes,
                position=position,
                streak=streak,
                streams=False,
            )
            yield Flow(bus, ledger, collector, feeder, batches, position)
    finally:
        await asyncio.to_thread(feeder.close)
        await until(lambda: _remove(folder))


def _remove(folder: Path) -> bool:
    """Try, and say whether it is gone; a thread that reads for a collector that has ended may write there once more."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


@asynccontextmanager
async def running(bus: Bus, model_path: Path, **settings: Any) -> AsyncIterator[Flow]:
    """The same, with collector and feeder at work."""
    async with open_flow(bus, model_path, **settings) as flow, asyncio.TaskGroup() as tasks:
        working = [tasks.create_task(flow.collector.run()), tasks.create_task(flow.feeder.run())]
        yield flow
        for task in working:
            await end_task(task)


@asynccontextmanager
async def resumed(
    bus: Bus, model_path: Path, *, num_steps: int, step: int, version: int, **settings: Any
) -> AsyncIterator[Flow]:
    """The same for a run that goes on after `step`: as in a trainer, the feeder begins once the collector has what the
    bus held, and the rest was published again."""
    async with open_flow(bus, model_path, **settings) as flow, asyncio.TaskGroup() as tasks:
        position = flow.position
        position.num_steps, position.step = num_steps, step
        position.version = position.announced_version = version
        working = [tasks.create_task(flow.collector.run())]
        await flow.collector.wait_until_caught_up()
        await flow.feeder.publish_again()
        working.append(tasks.create_task(flow.feeder.run()))
        yield flow
        for task in working:
            await end_task(task)


async def publish(bus: Bus, group: Group, *, copy: str = "") -> None:
    """Store a group as a worker does; `copy` makes a second copy that the bus cannot recognise."""
    images = ImageStore(bus)
    await images.ensure()
    for sha256 in group.images:
        await images.put(group.id.scope, IMAGES[sha256])
    await bus.publish(bus.groups, encode(group), message_id=group.id.message + copy)


async def num_prompts(bus: Bus) -> int:
    """Prompts on the bus."""
    return int((await bus.jetstream.stream_info(bus.prompts.name)).state.messages)


async def num_stored(bus: Bus) -> int:
    """Groups that are still on the bus."""
    return int((await bus.jetstream.stream_info(bus.groups.name)).state.messages)


async def num_images(bus: Bus) -> int:
    """Images that are still on the bus."""
    return int((await bus.jetstream.stream_info(bus.images.name)).state.messages)
