"""Feeder, collector and batch source on a real bus: what becomes of groups, and of their messages."""

import asyncio
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.bus.buckets.lock import claim
from penstock.bus.connection import Bus
from penstock.bus.work_queue.consumer import Delivery
from penstock.errors import DataError, SupersededError
from penstock.records import Group
from penstock.records.codec import encode
from services.trainer.admission.group_state import GroupStatus
from services.trainer.batching.images import ImagePatcher
from services.trainer.batching.sequences import TrainGroup
from tests.support.trainer.groups import IMAGES, make_group, num_placeholders, picture
from tests.support.trainer.runs.flow import RUN, num_images, num_prompts, num_stored, open_flow, publish, running
from tests.support.waiting import HANG_S, promptly, until


async def publish_failed(bus: Bus, group: Group, *, reason: str = "the image is broken") -> None:
    """Store what a worker reports when it could not play the group."""
    await publish(bus, msgspec.structs.replace(group, samples=(), error=reason))


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


async def test_groups_of_evaluations_never_reach_the_ledger(bus: Bus, tiny_model_path: Path) -> None:
    """They go to the evaluator, are acknowledged at once, and a training group of the same index is still wanted."""
    received: list[Group] = []

    async def receive(group: Group) -> None:
        received.append(group)

    evaluated = msgspec.structs.replace(make_group(tiny_model_path, index=0, version=1), purpose="geo3k-test")
    await publish(bus, evaluated)
    async with running(bus, tiny_model_path) as flow:
        flow.collector.evaluator = SimpleNamespace(receive=receive)  # type: ignore[assignment]
        await until(lambda: num_stored_is(bus, 0))
        await publish(bus, make_group(tiny_model_path, index=0, version=1), copy="/train")
        [finished] = await flow.next_batch(1)
    assert [each.purpose for each in received] == ["geo3k-test"]
    assert (finished.ready.index, flow.collector.num_duplicate, flow.collector.num_foreign) == (0, 0, 0)


async def test_groups_of_evaluations_that_come_together_are_acknowledged_together(
    bus: Bus, tiny_model_path: Path
) -> None:
    """Once the lock is confirmed for all of them, which other groups need not wait for."""
    received, num_received_at_confirmation = list[Group](), list[int]()

    async def receive(group: Group) -> None:
        received.append(group)

    async def confirm() -> None:
        num_received_at_confirmation.append(len(received))

    for index in range(3):
        group = msgspec.structs.replace(make_group(tiny_model_path, index=index, version=1), purpose="geo3k-test")
        await publish(bus, group)
    await publish(bus, make_group(tiny_model_path, index=0, version=1), copy="/train")
    async with running(bus, tiny_model_path) as flow:
        flow.collector.evaluator = SimpleNamespace(receive=receive)  # type: ignore[assignment]
        flow.collector.lock = SimpleNamespace(confirm=confirm)  # type: ignore[assignment]
        await until(lambda: num_stored_is(bus, 1))
        assert flow.ledger.num_receipts == 1
    assert num_received_at_confirmation == [3]


async def num_stored_is(bus: Bus, number: int) -> bool:
    """Whether the queue of groups holds this many."""
    return await num_stored(bus) == number


async def test_the_images_of_a_group_are_fetched_beside_each_other(bus: Bus, tiny_model_path: Path) -> None:
    """Tools show many, and each takes a round trip."""
    pictures, sizes = [picture(number) for number in range(3)], [num_placeholders((96, 96))] * 3
    group = make_group(tiny_model_path, version=1, images=pictures, placeholders=sizes)
    await publish(bus, group)
    async with running(bus, tiny_model_path, patcher=ImagePatcher(tiny_model_path)) as flow:
        get, all_asked = flow.collector.images.get, asyncio.Barrier(3)

        async def get_with_others(*image: str) -> bytes:
            await all_asked.wait()
            return await get(*image)

        flow.collector.images.get = get_with_others  # type: ignore[method-assign]
        (finished,) = await flow.next_batch(1)
    assert finished.images == {sha256: IMAGES[sha256] for sha256 in group.images}


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


async def test_a_group_that_fails_while_a_batch_trains_makes_room_at_once(bus: Bus, tiny_model_path: Path) -> None:
    """Engines must not run dry because the trainer is busy."""
    await publish(bus, make_group(tiny_model_path, index=0, version=1))
    async with running(bus, tiny_model_path, max_staleness=1) as flow:
        await flow.next_batch(1)
        await until(lambda: flow.ledger.status(1) is GroupStatus.ADMITTED)
        await publish_failed(bus, make_group(tiny_model_path, index=1, version=1))
        await until(lambda: flow.ledger.status(2) is GroupStatus.ADMITTED)
        assert flow.ledger.status(0) is GroupStatus.TRAINING


async def test_nothing_but_failures_ends_the_run_with_the_reason(bus: Bus, tiny_model_path: Path) -> None:
    """Failure after failure is a fault of data or set-up, and the error names the last."""
    for index in range(3):
        await publish_failed(bus, make_group(tiny_model_path, index=index, version=1), reason="unknown profile: geo4k")
    async with open_flow(bus, tiny_model_path, groups_per_step=4) as flow, asyncio.timeout(HANG_S):
        with pytest.raises(DataError, match=r"3 groups in a row failed.*more than 2.*geo4k"):
            await flow.collector.run()


async def test_failures_of_an_earlier_start_do_not_end_the_run(bus: Bus, tiny_model_path: Path) -> None:
    """They come again until a checkpoint accounts for them; what made groups fail may be mended."""
    for index in range(4):
        await publish_failed(bus, make_group(tiny_model_path, index=index, version=1), reason="the server was away")
    await publish(bus, make_group(tiny_model_path, index=4, version=1))
    async with running(bus, tiny_model_path, groups_per_step=1, trainer_epoch="b") as flow:
        (finished,) = await flow.next_batch(1)
    assert (finished.ready.index, flow.ledger.counts.failed) == (4, 4)


async def _is_empty(bus: Bus) -> bool:
    return await num_stored(bus) == 0


async def test_other_runs_leftovers_are_removed(bus: Bus, tiny_model_path: Path) -> None:
    """A group of another run on the same bus is not trained and not kept."""
    await publish(bus, make_group(tiny_model_path, index=0, version=1))
    async with running(bus, tiny_model_path, run_id="this-run") as flow:
        await until(partial(_is_empty, bus))
    assert flow.collector.num_foreign == 1
    assert flow.ledger.wants(0, 0)


async def test_groups_of_another_temperature_are_played_again(bus: Bus, tiny_model_path: Path) -> None:
    """A run that is resumed with another one must not compare the log-probabilities of both, whatever the version; nor
    keep the images of the groups that it passes over."""
    played_again = msgspec.structs.replace(make_group(tiny_model_path, version=1), temperature=1.0)
    shown = make_group(tiny_model_path, version=1, images=[picture(0)], placeholders=[num_placeholders((96, 96))])
    await publish(bus, msgspec.structs.replace(shown, temperature=0.5))
    assert await num_images(bus) == 1
    async with running(bus, tiny_model_path, trainer_epoch="b") as flow, asyncio.timeout(HANG_S):
        await flow.collector.wait_until_caught_up()
        assert await num_images(bus) == 0
        flow.announce(1)
        await until(lambda: flow.ledger.status(0) is not GroupStatus.UNADMITTED)
        assert (flow.ledger.status(0), flow.collector.num_foreign) == (GroupStatus.ADMITTED, 1)
        async with flow.feeder.publishing:  # held until the prompt is on the bus
            assert (await num_prompts(bus), await num_stored(bus)) == (1, 0)
        await publish(bus, played_again, copy="/again")
        (finished,) = await flow.next_batch(1)
    assert finished.played.temperature == 1.0


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


async def test_prompts_that_the_bus_loses_again_and_again_end_the_run(bus: Bus, tiny_model_path: Path) -> None:
    """As when something else takes the run's messages: waiting and publishing again would never end."""
    async with running(bus, tiny_model_path) as flow:
        flow.batches.silence_s = 0.01
        waiting = asyncio.create_task(flow.next_batch(1))
        while not waiting.done():
            await bus.purge(bus.prompts)
        with pytest.raises(DataError, match=r"group 0 was lost 3 times .*the bus holds neither its prompt nor"):
            await waiting


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


@pytest.mark.parametrize("num_groups", [0, 2])
async def test_catching_up_waits_for_nothing_that_is_not_stored(
    bus: Bus, tiny_model_path: Path, num_groups: int
) -> None:
    """A fetch that finds nothing takes a second, which a trainer that starts again need not wait."""
    for index in range(num_groups):
        await publish(bus, make_group(tiny_model_path, index=index, version=1))
    async with running(bus, tiny_model_path) as flow:
        fetch = flow.collector.consumer.fetch

        async def fetch_some(limit: int) -> list[Delivery]:
            while not (found := await fetch(limit)):
                pass
            return found

        flow.collector.consumer.fetch = fetch_some  # type: ignore[method-assign]
        await promptly(flow.collector.wait_until_caught_up())
        assert flow.ledger.num_receipts == num_groups
