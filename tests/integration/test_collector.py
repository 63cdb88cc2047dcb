"""Feeder, collector and batch source on a real bus: what becomes of groups, and of their messages."""

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.bus.connection import Bus, connect
from penstock.bus.consumer import Delivery, consuming
from penstock.bus.image_store import ImageStore
from penstock.bus.lock import claim
from penstock.config import BusConfig
from penstock.errors import DataError, SetupError, SupersededError
from penstock.model.tokens import forbidden_token_ids, image_token_id
from penstock.records import Group, Sampling
from penstock.records.codec import encode
from penstock.runtime.process import end_task
from services.trainer.admission.gate import Gate
from services.trainer.admission.ledger import GroupLedger, GroupStatus
from services.trainer.batching.images import ImagePatcher
from services.trainer.batching.sequences import GroupReader, ModelTokens, TrainGroup
from services.trainer.config import DataConfig
from services.trainer.data.dataset import open_dataset
from services.trainer.flow.batch_source import BatchSource
from services.trainer.flow.changes import Changes
from services.trainer.flow.collector import Collector, Finished
from services.trainer.flow.crash_record import CrashRecord
from services.trainer.flow.failure_streak import FailureStreak
from services.trainer.flow.feeder import Feeder
from services.trainer.position import Position
from tests.support.cuttable_link import CuttableLink
from tests.support.trainer.groups import IMAGES, make_group, num_placeholders, picture
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
            return await self.batches.next()

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
) -> AsyncIterator[Flow]:
    """Open what a trainer has at its start; everything unacknowledged is delivered again."""
    tokens = ModelTokens(
        vocab_size=512, image_id=image_token_id(model_path), forbidden_ids=frozenset(forbidden_token_ids(model_path))
    )
    ledger: GroupLedger[Finished, Delivery] = GroupLedger(
        Gate(max_staleness=max_staleness, groups_per_step=groups_per_step)
    )
    position = Position(num_steps=NUM_STEPS, step=0, version=0)
    changes = Changes()
    images = ImageStore(bus)
    await images.ensure()
    feeder = Feeder(
        dataset=open_dataset(DataConfig()),
        ledger=ledger,
        position=position,
        changes=changes,
        bus=bus,
        images=images,
        sampling=Sampling(temperature=1.0),
        run_id=run_id,
        trainer_epoch="a",
        samples_per_group=4,
        profile="geo3k",
        environment="single_turn",
    )
    streak = FailureStreak(max_in_a_row=2)
    consumer = consuming(bus, bus.groups, "trainer", ack_wait_s=ack_wait_s, max_ack_pending=1000, fresh=True)
    with tempfile.TemporaryDirectory() as folder:
        async with consumer as groups:
            collector = Collector(
                consumer=groups,
                ledger=ledger,
                changes=changes,
                reader=GroupReader(tokens, patcher),
                lock=await claim(bus, "trainer", ttl_s=0.0),
                images=images,
                run_id=run_id,
                streak=streak,
                crashes=CrashRecord(Path(folder) / "in_hand.json"),
            )
            batches = BatchSource(
                ledger=ledger, feeder=feeder, collector=collector, changes=changes, position=position, streak=streak
            )
            yield Flow(bus, ledger, collector, feeder, batches, position)


@asynccontextmanager
async def running(bus: Bus, model_path: Path, **settings: Any) -> AsyncIterator[Flow]:
    """The same, with collector and feeder at work."""
    async with open_flow(bus, model_path, **settings) as flow, asyncio.TaskGroup() as tasks:
        working = [tasks.create_task(flow.collector.run()), tasks.create_task(flow.feeder.run())]
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


async def publish_failed(bus: Bus, group: Group, *, reason: str = "the image is broken") -> None:
    """Store what a worker reports when it could not play the group."""
    await publish(bus, msgspec.structs.replace(group, samples=(), error=reason))


async def num_stored(bus: Bus) -> int:
    """Groups that are still on the bus."""
    return int((await bus.jetstream.stream_info(bus.groups.name)).state.messages)


async def num_prompts(bus: Bus) -> int:
    """Prompts on the bus."""
    return int((await bus.jetstream.stream_info(bus.prompts.name)).state.messages)


async def test_trained_groups_leave_the_bus_only_when_settled(bus: Bus, tiny_model_path: Path) -> None:
    """A message is acked with the checkpoint; a group that is held but not trained stays on the bus."""
    for index in range(3):
        await publish(bus, make_group(tiny_model_path, index=index, version=1))
    async with running(bus, tiny_model_path, max_staleness=1, groups_per_step=2) as flow:
        batch = await flow.next_batch(1)
        assert [finished.ready.index for finished in batch] == [0, 1]
        flow.ledger.finish_training()
        await until(lambda: flow.ledger.status(2) is GroupStatus.HELD)
        assert await num_stored(bus) == 3
        assert await flow.settle() == 2
    assert await num_stored(bus) == 1, "only the untrained group is still there"


async def test_restart_brings_back_what_was_not_settled(bus: Bus, tiny_model_path: Path) -> None:
    """A trainer that dies before its checkpoint gets the same groups again."""
    for index in range(2):
        await publish(bus, make_group(tiny_model_path, index=index, version=1))
    for _ in range(2):
        async with running(bus, tiny_model_path, groups_per_step=2) as flow:
            batch = await flow.next_batch(1)
        assert [finished.ready.index for finished in batch] == [0, 1]


async def test_groups_in_hand_are_not_played_again_after_a_restart(bus: Bus, tiny_model_path: Path) -> None:
    """Only what neither the bus holds nor the state knows as finished is published again, in place of the old queue."""
    await publish(bus, make_group(tiny_model_path, index=1, version=1))
    async with running(bus, tiny_model_path, groups_per_step=3) as flow, asyncio.timeout(HANG_S):
        flow.announce(1)
        await until(lambda: flow.ledger.num_untrained == 3)
        await flow.collector.wait_until_caught_up()
        flow.feeder.trainer_epoch = "b"
        await flow.feeder.publish_again()
    assert await num_prompts(bus) == 2


async def test_duplicates_are_trained_once(bus: Bus, tiny_model_path: Path) -> None:
    """A second copy, of a group that is held or was trained, is counted and dropped."""
    group = make_group(tiny_model_path, index=0, version=1)
    await publish(bus, group)
    await publish(bus, group, copy="/again")
    async with running(bus, tiny_model_path) as flow:
        await flow.next_batch(1)
        flow.ledger.finish_training()
        await publish(bus, group, copy="/and-again")
        await until(lambda: flow.collector.num_duplicate == 2)
        await until(lambda: flow.ledger.num_receipts == 3)
    assert await flow.settle() == 3, "none of them is kept"


async def test_stale_group_is_rejected_and_another_attempt_trained(bus: Bus, tiny_model_path: Path) -> None:
    """A group over the bound is never trained; its prompt is admitted again, and that attempt is."""
    await publish(bus, make_group(tiny_model_path, index=0, version=1))
    async with running(bus, tiny_model_path) as flow:
        waiting = asyncio.create_task(flow.next_batch(2))
        await until(lambda: [each.attempt for each in flow.ledger.unplayed()] == [1])
        assert not waiting.done()
        await publish(bus, make_group(tiny_model_path, index=0, attempt=1, version=2))
        (finished,) = await waiting
    assert (finished.ready.index, finished.ready.attempt) == (0, 1)
    counts = flow.ledger.counts
    assert (counts.rejected, counts.redrawn) == (1, 1)
    assert counts.rejected_tokens == counts.redrawn_tokens == 3 + 4 + 5 + 6


async def test_failed_group_makes_room_for_the_next(bus: Bus, tiny_model_path: Path) -> None:
    """A group that could not be played is dropped, and a new one admitted in its place: nothing waits for ever."""
    await publish_failed(bus, make_group(tiny_model_path, index=0, version=1))
    await publish(bus, make_group(tiny_model_path, index=1, version=1))
    async with running(bus, tiny_model_path) as flow:
        (finished,) = await flow.next_batch(1)
    assert finished.ready.index == 1
    assert flow.ledger.counts.failed == 1


async def test_nothing_but_failures_ends_the_run_with_the_reason(bus: Bus, tiny_model_path: Path) -> None:
    """Failure after failure is a fault of data or set-up, and the error names the last."""
    for index in range(3):
        await publish_failed(bus, make_group(tiny_model_path, index=index, version=1), reason="unknown profile: geo4k")
    async with open_flow(bus, tiny_model_path, groups_per_step=4) as flow, asyncio.timeout(HANG_S):
        with pytest.raises(DataError, match=r"3 groups in a row failed.*max_failures_in_a_row = 2.*geo4k"):
            await flow.collector.run()


async def test_group_cut_off_on_its_way_comes_again_after_the_ack_wait(
    bus: Bus, bus_config: BusConfig, run_name: str, tiny_model_path: Path
) -> None:
    """The connection breaks in the middle of a group: the server counts it as delivered, and delivers it again."""
    group = make_group(tiny_model_path, index=0, version=1, own_lengths=[20_000] * 4)
    async with CuttableLink.to(bus_config.url) as link:
        async with (
            connect(bus_config.model_copy(update={"url": link.url}), run=run_name) as trainers_bus,
            running(trainers_bus, tiny_model_path, ack_wait_s=1.0) as flow,
        ):
            link.cut_after(100_000)
            await publish(bus, group)
            (finished,) = await flow.next_batch(1)
        assert link.num_cuts == 1
    assert finished.ready.index == 0


async def test_other_runs_leftovers_are_removed(bus: Bus, tiny_model_path: Path) -> None:
    """A group of another run on the same bus is not trained and not kept."""
    await publish(bus, make_group(tiny_model_path, index=0, version=1))
    async with running(bus, tiny_model_path, run_id="this-run") as flow, asyncio.timeout(HANG_S):
        while await num_stored(bus):
            await asyncio.sleep(0.05)
    assert flow.collector.num_foreign == 1
    assert flow.ledger.wants(0, 0)


async def test_trainer_that_was_replaced_leaves_its_successors_groups(bus: Bus, tiny_model_path: Path) -> None:
    """They are of a run that it does not know; it ends instead of removing them."""
    async with open_flow(bus, tiny_model_path, run_id="replaced-run") as flow:
        await claim(bus, "trainer", ttl_s=0.0)
        await publish(bus, make_group(tiny_model_path, index=0, version=1))
        async with asyncio.timeout(HANG_S):
            with pytest.raises(SupersededError):
                await flow.collector.run()
    assert await num_stored(bus) == 1


async def test_group_that_is_being_read_is_not_settled(bus: Bus, tiny_model_path: Path) -> None:
    """A checkpoint taken while a group is expanded in another thread must leave its message on the bus."""
    is_reading, may_end = threading.Event(), threading.Event()
    async with running(bus, tiny_model_path) as flow:
        read = flow.collector.reader.read

        def read_slowly(group: Group, images: Mapping[str, bytes]) -> TrainGroup:
            is_reading.set()
            may_end.wait(10)
            return read(group, images)

        flow.collector.reader.read = read_slowly  # type: ignore[method-assign]
        await publish(bus, make_group(tiny_model_path, index=0, version=1))
        await asyncio.to_thread(is_reading.wait)
        assert await flow.settle() == 0
        may_end.set()
        await flow.next_batch(1)
        flow.ledger.finish_training()
        assert await flow.settle() == 1


async def test_undecodable_group_is_not_waited_for(bus: Bus, tiny_model_path: Path) -> None:
    """Bytes that are not a group are buried, and the group that their id names counts as failed."""
    await bus.publish(bus.groups, b"\xc1 garbage", message_id=f"{RUN}/0/0/a")
    await publish(bus, make_group(tiny_model_path, index=1, version=1))
    async with running(bus, tiny_model_path) as flow:
        (finished,) = await flow.next_batch(1)
    assert finished.ready.index == 1
    assert flow.ledger.counts.failed == 1
    assert (await bus.jetstream.stream_info(bus.dead.name)).state.messages == 1


async def test_group_that_contradicts_the_model_is_buried_and_the_run_goes_on(bus: Bus, tiny_model_path: Path) -> None:
    """It counts as failed, a copy is kept with the reason, and its message leaves the bus only with a checkpoint."""
    picture_without_patcher = make_group(
        tiny_model_path, index=0, version=1, images=[picture(0)], placeholders=[num_placeholders((96, 96))]
    )
    await publish(bus, picture_without_patcher)
    await publish(bus, make_group(tiny_model_path, index=1, version=1))
    async with running(bus, tiny_model_path) as flow:
        (finished,) = await flow.next_batch(1)
        assert finished.ready.index == 1
        assert (flow.ledger.counts.failed, flow.collector.num_unreadable) == (1, 1)
        letter = await bus.jetstream.get_last_msg(bus.dead.name, bus.dead.subject)
        assert letter.headers is not None
        assert "sample 0: it has an image, but the model reads text only" in letter.headers["Penstock-Reason"]
        assert letter.data == encode(picture_without_patcher)
        assert await num_stored(bus) == 2
        flow.ledger.finish_training()
        assert await flow.settle() == 2
    assert await num_stored(bus) == 0


def make_group_with_picture(model_path: Path, *, index: int = 0, attempt: int = 0) -> Group:
    """A group of version 1 whose prompt shows one picture."""
    return make_group(
        model_path, index=index, attempt=attempt, images=[picture(index)], placeholders=[num_placeholders((96, 96))]
    )


async def test_group_with_images_is_read_before_and_after_a_restart(bus: Bus, tiny_model_path: Path) -> None:
    """It is held with the images that its samples show; a trainer that starts again fetches them again."""
    group = make_group_with_picture(tiny_model_path)
    await publish(bus, group)
    patcher = ImagePatcher(tiny_model_path)
    for _ in range(2):
        async with running(bus, tiny_model_path, patcher=patcher) as flow:
            (finished,) = await flow.next_batch(1)
        assert finished.images == {sha256: IMAGES[sha256] for sha256 in group.images}
        assert all(sequence.images for sequence in finished.ready.sequences)
        assert (flow.ledger.counts.failed, flow.ledger.counts.lost) == (0, 0)


async def test_group_whose_images_are_gone_is_lost_and_played_again(bus: Bus, tiny_model_path: Path) -> None:
    """More of them in a row than may fail do not end the run; each message leaves the bus with a checkpoint."""
    groups = [make_group_with_picture(tiny_model_path, index=index) for index in range(4)]
    for group in groups:
        await publish(bus, group)
        await ImageStore(bus).remove(group.id.scope)
    async with running(bus, tiny_model_path, groups_per_step=4, patcher=ImagePatcher(tiny_model_path)) as flow:
        assert flow.collector.streak.max_in_a_row < len(groups)
        waiting = asyncio.create_task(flow.next_batch(1))
        await until(lambda: flow.ledger.counts.lost == len(groups))
        await until(lambda: [each.attempt for each in flow.ledger.unplayed()] == [1] * len(groups))
        assert await flow.settle() == len(groups)
        for index in range(len(groups)):
            await publish(bus, make_group_with_picture(tiny_model_path, index=index, attempt=1))
        batch = await waiting
    assert [(finished.ready.index, finished.ready.attempt) for finished in batch] == [(n, 1) for n in range(4)]
    assert (flow.ledger.counts.failed, flow.ledger.counts.redrawn) == (0, len(groups))


async def test_a_group_that_is_lost_again_and_again_ends_the_run(bus: Bus, tiny_model_path: Path) -> None:
    """Something removes what the run stores: a person must see to it."""
    for attempt in range(3):
        group = make_group_with_picture(tiny_model_path, attempt=attempt)
        await publish(bus, group)
        await ImageStore(bus).remove(group.id.scope)
    async with (
        asyncio.timeout(20),
        open_flow(bus, tiny_model_path, patcher=ImagePatcher(tiny_model_path)) as flow,
    ):
        with pytest.raises(DataError, match=r"group 0 was lost 3 times .*max_failures_in_a_row = 2"):
            await flow.collector.run()


async def test_prompts_that_the_bus_loses_again_and_again_end_the_run(bus: Bus, tiny_model_path: Path) -> None:
    """As when something else takes the run's messages: waiting and publishing again would never end."""
    async with running(bus, tiny_model_path) as flow:
        flow.batches.silence_s = 0.01
        waiting = asyncio.create_task(flow.next_batch(1))
        while not waiting.done():
            await bus.purge(bus.prompts)
        with pytest.raises(DataError, match=r"group 0 was lost 3 times .*the bus holds neither its prompt nor"):
            await waiting


async def test_prompt_whose_images_are_gone_is_admitted_again(bus: Bus, tiny_model_path: Path) -> None:
    """A worker could not begin the group: it is lost, not failed."""
    group = make_group(tiny_model_path, index=0)
    await publish(bus, msgspec.structs.replace(group, samples=(), error="image 0a is not stored", is_lost=True))
    async with running(bus, tiny_model_path) as flow:
        waiting = asyncio.create_task(flow.next_batch(1))
        await until(lambda: [each.attempt for each in flow.ledger.unplayed()] == [1])
        await publish(bus, make_group(tiny_model_path, index=0, attempt=1))
        (finished,) = await waiting
    assert finished.ready.attempt == 1
    assert (flow.ledger.counts.failed, flow.ledger.counts.lost) == (0, 1)


async def test_stream_of_images_that_is_gone_ends_the_run(bus: Bus, tiny_model_path: Path) -> None:
    """A group waits for its images while the server is away, but not for a stream that the server no longer has."""
    async with open_flow(bus, tiny_model_path) as flow:
        await publish(bus, make_group_with_picture(tiny_model_path))
        flow.collector.images = ImageStore(bus)
        await bus.jetstream.delete_stream(bus.images.name)
        async with asyncio.timeout(HANG_S):
            with pytest.raises(SetupError, match=rf"stream {bus.images.name} is gone from NATS"):
                await flow.collector.run()


async def test_lost_group_is_noticed_and_played_again(bus: Bus, tiny_model_path: Path) -> None:
    """The host of NATS died, and neither queue has what it acknowledged: another attempt is admitted."""
    async with running(bus, tiny_model_path) as flow:
        flow.batches.silence_s = 0.01
        waiting = asyncio.create_task(flow.next_batch(1))
        await until(lambda: len(flow.ledger.unplayed()) == 1)
        while await num_prompts(bus) == 0:
            await asyncio.sleep(0.01)
        await bus.purge(bus.prompts)
        await until(lambda: flow.ledger.counts.lost == 1)
        await publish(bus, make_group(tiny_model_path, index=0, attempt=1, version=1))
        (finished,) = await waiting
    assert finished.ready.attempt == 1
    assert flow.ledger.counts.redrawn == 1


async def test_group_that_takes_long_is_not_taken_for_lost(bus: Bus, tiny_model_path: Path) -> None:
    """While its prompt is with a worker, or the group on its way, nothing is admitted in its place."""
    async with running(bus, tiny_model_path) as flow:
        flow.batches.silence_s = 0.01
        looks = []
        has_prompts = flow.feeder.has_prompts

        async def look() -> bool:
            looks.append(await has_prompts())
            return looks[-1]

        flow.batches.feeder = SimpleNamespace(  # type: ignore[assignment]
            wake=flow.feeder.wake,
            publishing=flow.feeder.publishing,
            has_prompts=look,
            replace_lost=flow.feeder.replace_lost,
        )
        waiting = asyncio.create_task(flow.next_batch(1))
        await until(lambda: len(looks) >= 3)
        await publish(bus, make_group(tiny_model_path, index=0, version=1))
        (finished,) = await waiting
    assert finished.ready.attempt == 0
    assert flow.ledger.counts.lost == 0


async def test_what_a_worker_sampled_again_is_counted(bus: Bus, tiny_model_path: Path) -> None:
    """Its prompt was delivered twice: to a worker that died, and to the one that finished the group."""
    group = make_group(tiny_model_path, index=0, version=1)
    await publish(bus, msgspec.structs.replace(group, num_deliveries=2))
    async with running(bus, tiny_model_path) as flow:
        await flow.next_batch(1)
    assert (flow.ledger.counts.redrawn, flow.ledger.counts.redrawn_tokens) == (1, 3 + 4 + 5 + 6)


async def test_stale_group_that_arrives_while_others_are_admitted(bus: Bus, tiny_model_path: Path) -> None:
    """Publishing a prompt takes time, in which groups arrive: they are checked before the choice, not chosen from."""
    await publish(bus, make_group(tiny_model_path, index=0, version=1))
    async with running(bus, tiny_model_path, groups_per_step=2) as flow:
        publish_prompts = flow.feeder.bus.publish

        async def publish_slowly(*args: Any, **settings: Any) -> bool:
            if flow.ledger.counts.rejected == 1 and flow.ledger.wants(1, 0):
                await publish(flow.bus, make_group(tiny_model_path, index=1, version=1))
                await until(lambda: not flow.ledger.wants(1, 0))
            return await publish_prompts(*args, **settings)

        flow.feeder.bus = SimpleNamespace(prompts=bus.prompts, publish=publish_slowly)  # type: ignore[assignment]
        waiting = asyncio.create_task(flow.next_batch(5))
        await until(lambda: flow.ledger.counts.rejected == 2)
        for index in range(2):
            await publish(bus, make_group(tiny_model_path, index=index, attempt=1, version=5))
        assert [finished.ready.attempt for finished in await waiting] == [1, 1]


async def test_early_stale_group_takes_the_place_of_a_failed_one(bus: Bus, tiny_model_path: Path) -> None:
    """After a restart: a group that the gate had not reached yet is stale when it does; it is rejected, not chosen."""
    await publish(bus, make_group(tiny_model_path, index=1, version=1))
    await publish_failed(bus, make_group(tiny_model_path, index=0, version=5))
    async with running(bus, tiny_model_path) as flow:
        waiting = asyncio.create_task(flow.next_batch(5))
        await until(lambda: flow.ledger.counts.rejected == 1)
        await publish(bus, make_group(tiny_model_path, index=1, attempt=1, version=5))
        (finished,) = await waiting
    assert (finished.ready.index, finished.ready.attempt) == (1, 1)


async def test_copy_that_arrives_during_training_is_a_duplicate(bus: Bus, tiny_model_path: Path) -> None:
    """It is neither held for ever nor trained again, and its message is settled with the group's."""
    group = make_group(tiny_model_path, index=0, version=1)
    await publish(bus, group)
    async with running(bus, tiny_model_path) as flow:
        await flow.next_batch(1)
        await publish(bus, group, copy="/again")
        await until(lambda: flow.collector.num_duplicate == 1)
        flow.ledger.finish_training()
        await until(lambda: flow.ledger.num_receipts == 2)
        assert await flow.settle() == 2


async def test_caught_up_means_that_everything_stored_is_here(bus: Bus, tiny_model_path: Path) -> None:
    """What was on the bus before the start is in hand when the wait ends."""
    for index in range(3):
        await publish(bus, make_group(tiny_model_path, index=index, version=1))
    async with running(bus, tiny_model_path, groups_per_step=3) as flow, asyncio.timeout(HANG_S):
        await flow.collector.wait_until_caught_up()
        assert not any(flow.ledger.wants(index, 0) for index in range(3))
