"""Groups, prompts and images that the bus has lost are noticed, and played again or told."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from penstock.bus.connection import Bus, connect
from penstock.bus.image_store import ImageStore
from penstock.config import BusConfig
from penstock.errors import DataError, SetupError
from penstock.records import Group
from services.trainer.batching.images import ImagePatcher
from tests.support.cuttable_link import CuttableLink
from tests.support.trainer.groups import IMAGES, make_group, num_placeholders, picture
from tests.support.trainer.runs.flow import num_prompts, open_flow, publish, running
from tests.support.waiting import HANG_S, until


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
        with pytest.raises(DataError, match=r"group 0 was lost 3 times .*more than 2"):
            await flow.collector.run()


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
        await until(lambda: num_prompts(bus))
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
            num_unsent=0,
        )
        waiting = asyncio.create_task(flow.next_batch(1))
        await until(lambda: len(looks) >= 3)
        await publish(bus, make_group(tiny_model_path, index=0, version=1))
        (finished,) = await waiting
    assert finished.ready.attempt == 0
    assert flow.ledger.counts.lost == 0
