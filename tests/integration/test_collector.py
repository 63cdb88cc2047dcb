"""The collector against a real bus: what becomes of groups, and of their messages."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from penstock.bus.connection import Bus
from penstock.bus.consumer import consuming
from penstock.errors import DataError
from penstock.model.tokens import forbidden_token_ids, image_token_id
from penstock.records import Group
from penstock.records.codec import encode
from services.trainer.admission.gate import Gate
from services.trainer.flow.collector import Collector
from services.trainer.policy.batch import GroupReader, ModelTokens, TrainGroup
from tests.train_groups import make_group

RUN = "run"
"""The run id of `make_group`."""


OpenCollector = Callable[[], Awaitable[Collector]]
CollectorOf = Callable[[Bus, Gate, Path], OpenCollector]


@pytest.fixture
async def collector_of() -> AsyncIterator[CollectorOf]:
    """What opens a collector as the trainer does at its start: everything unacked is delivered again."""
    async with AsyncExitStack() as stack:

        def of(bus: Bus, gate: Gate, model_path: Path) -> OpenCollector:
            async def open_one() -> Collector:
                consumer = await stack.enter_async_context(
                    consuming(bus, bus.groups, "trainer", ack_wait_s=60.0, max_ack_pending=1000, fresh=True)
                )
                tokens = ModelTokens(
                    vocab_size=256,
                    image_id=image_token_id(model_path),
                    forbidden_ids=frozenset(forbidden_token_ids(model_path)),
                )
                return Collector(
                    consumer=consumer,
                    gate=gate,
                    reader=GroupReader(tokens, None),
                    run_id=RUN,
                    max_failures_in_a_row=2,
                )

            return open_one

        yield of


@asynccontextmanager
async def running(collector: Collector) -> AsyncIterator[None]:
    """The collector at work."""
    task = asyncio.create_task(collector.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def publish(bus: Bus, group: Group, *, copy: str = "") -> None:
    """Store a group as a worker does; `copy` makes a second copy that the bus cannot recognise."""
    await bus.publish(bus.groups, encode(group), message_id=group.prompt.message_id + copy)


async def num_stored(bus: Bus) -> int:
    """Messages that are still on the bus."""
    return int((await bus.jetstream.stream_info(bus.groups.name)).state.messages)


def admit_all(gate: Gate, version: int) -> Callable[[], Awaitable[int]]:
    """What the feeder does, without publishing."""

    async def admit() -> int:
        count = gate.num_admissible()
        for _ in range(count):
            gate.admit(version)
        return count

    return admit


async def test_trained_groups_leave_the_bus_only_when_settled(
    collector_of: CollectorOf, bus: Bus, tiny_model_path: Path
) -> None:
    """A message is acked with the checkpoint; a group that is held but not trained stays on the bus."""
    gate = Gate(max_staleness=1, groups_per_step=2)
    await admit_all(gate, 1)()
    collector = await collector_of(bus, gate, tiny_model_path)()
    for index in range(3):
        await publish(bus, make_group(tiny_model_path, index=index, version=1))
    async with running(collector), asyncio.timeout(20):
        batch = await collector.next_batch(1, admit_all(gate, 1))
        assert [finished.ready.index for finished in batch] == [0, 1]
        gate.trained([0, 1])
        while not collector.holds(2, 0):
            await asyncio.sleep(0.05)
        settled = collector.take_unsettled()
        assert await num_stored(bus) == 3
        for delivery in settled:
            await delivery.ack()
    assert await num_stored(bus) == 1, "only the untrained group is still there"


async def test_restart_brings_back_what_was_not_settled(
    collector_of: CollectorOf, bus: Bus, tiny_model_path: Path
) -> None:
    """A trainer that dies before its checkpoint gets the same groups again."""
    gate = Gate(max_staleness=0, groups_per_step=2)
    await admit_all(gate, 1)()
    open_collector = collector_of(bus, gate, tiny_model_path)
    for index in range(2):
        await publish(bus, make_group(tiny_model_path, index=index, version=1))
    for _ in range(2):
        collector = await open_collector()
        async with running(collector), asyncio.timeout(20):
            batch = await collector.next_batch(1, admit_all(gate, 1))
        assert [finished.ready.index for finished in batch] == [0, 1]


async def test_duplicates_are_trained_once(collector_of: CollectorOf, bus: Bus, tiny_model_path: Path) -> None:
    """A second copy, of a group that is held or was trained, is counted and dropped."""
    gate = Gate(max_staleness=0, groups_per_step=1)
    await admit_all(gate, 1)()
    collector = await collector_of(bus, gate, tiny_model_path)()
    group = make_group(tiny_model_path, index=0, version=1)
    await publish(bus, group)
    await publish(bus, group, copy="/again")
    async with running(collector), asyncio.timeout(20):
        await collector.next_batch(1, admit_all(gate, 1))
        gate.trained([0])
        await publish(bus, group, copy="/and-again")
        while collector.num_duplicate < 2:
            await asyncio.sleep(0.05)
    assert len(collector.take_unsettled()) == 3, "none of them is kept"


async def test_stale_group_is_rejected_and_another_attempt_trained(
    collector_of: CollectorOf, bus: Bus, tiny_model_path: Path
) -> None:
    """A group over the bound is never trained; its prompt is admitted again, and that attempt is."""
    gate = Gate(max_staleness=0, groups_per_step=1)
    await admit_all(gate, 1)()
    collector = await collector_of(bus, gate, tiny_model_path)()
    await publish(bus, make_group(tiny_model_path, index=0, version=1))
    async with running(collector), asyncio.timeout(20):
        waiting = asyncio.create_task(collector.next_batch(2, admit_all(gate, 2)))
        while 0 not in gate.outstanding or gate.outstanding[0].attempt != 1:
            await asyncio.sleep(0.05)
        assert not waiting.done()
        await publish(bus, make_group(tiny_model_path, index=0, attempt=1, version=2))
        (finished,) = await waiting
    assert (finished.ready.index, finished.ready.attempt) == (0, 1)
    assert gate.num_rejected == 1
    assert collector.num_rejected_tokens > 0


async def test_failed_group_makes_room_for_the_next(collector_of: CollectorOf, bus: Bus, tiny_model_path: Path) -> None:
    """A group that could not be played is dropped, and a new one admitted in its place: nothing waits for ever."""
    gate = Gate(max_staleness=0, groups_per_step=1)
    await admit_all(gate, 1)()
    collector = await collector_of(bus, gate, tiny_model_path)()
    played = make_group(tiny_model_path, index=0, version=1)
    await publish(bus, Group(prompt=played.prompt, samples=(), worker_id="w", error="the image is broken"))
    await publish(bus, make_group(tiny_model_path, index=1, version=1))
    async with running(collector), asyncio.timeout(20):
        (finished,) = await collector.next_batch(1, admit_all(gate, 1))
    assert finished.ready.index == 1
    assert gate.num_dropped == 1


async def test_nothing_but_failures_ends_the_run_with_the_reason(
    collector_of: CollectorOf, bus: Bus, tiny_model_path: Path
) -> None:
    """Failure after failure is a fault of data or set-up, and a person is told which."""
    gate = Gate(max_staleness=0, groups_per_step=4)
    await admit_all(gate, 1)()
    collector = await collector_of(bus, gate, tiny_model_path)()
    for index in range(3):
        prompt = make_group(tiny_model_path, index=index, version=1).prompt
        await publish(bus, Group(prompt=prompt, samples=(), worker_id="w", error="no such profile: geo4k"))
    with pytest.raises(DataError, match=r"3 groups in a row could not be played.*geo4k"):
        async with asyncio.timeout(20):
            await collector.run()


async def test_other_runs_leftovers_are_removed(collector_of: CollectorOf, bus: Bus, tiny_model_path: Path) -> None:
    """A group of another run on the same bus is not trained and not kept."""
    gate = Gate(max_staleness=0, groups_per_step=1)
    await admit_all(gate, 1)()
    collector = await collector_of(bus, gate, tiny_model_path)()
    collector.run_id = "this-run"
    await publish(bus, make_group(tiny_model_path, index=0, version=1))
    async with running(collector), asyncio.timeout(20):
        while await num_stored(bus):
            await asyncio.sleep(0.05)
    assert collector.num_foreign == 1
    assert not collector.holds(0, 0)


async def test_group_that_is_being_read_is_not_settled(
    collector_of: CollectorOf, bus: Bus, tiny_model_path: Path
) -> None:
    """A checkpoint taken while a group is expanded in another thread must leave its message on the bus."""
    gate = Gate(max_staleness=0, groups_per_step=1)
    await admit_all(gate, 1)()
    collector = await collector_of(bus, gate, tiny_model_path)()
    is_reading, may_end = threading.Event(), threading.Event()
    read = collector.reader.read

    def read_slowly(group: Group) -> TrainGroup:
        is_reading.set()
        may_end.wait(10)
        return read(group)

    collector.reader.read = read_slowly  # type: ignore[method-assign]
    await publish(bus, make_group(tiny_model_path, index=0, version=1))
    async with running(collector), asyncio.timeout(20):
        await asyncio.to_thread(is_reading.wait)
        assert collector.take_unsettled() == []
        may_end.set()
        await collector.next_batch(1, admit_all(gate, 1))
        gate.trained([0])
        assert len(collector.take_unsettled()) == 1


async def test_group_of_lost_weights_is_rejected(collector_of: CollectorOf, bus: Bus, tiny_model_path: Path) -> None:
    """Tokens of a version that was never published are of weights that nobody has any more."""
    gate = Gate(max_staleness=5, groups_per_step=1)
    await admit_all(gate, 1)()
    collector = await collector_of(bus, gate, tiny_model_path)()
    await publish(bus, make_group(tiny_model_path, index=0, version=3))
    async with running(collector), asyncio.timeout(20):
        waiting = asyncio.create_task(collector.next_batch(2, admit_all(gate, 2)))
        while gate.num_rejected == 0:
            await asyncio.sleep(0.05)
        waiting.cancel()


async def test_undecodable_group_is_not_waited_for(collector_of: CollectorOf, bus: Bus, tiny_model_path: Path) -> None:
    """Bytes that are no group are buried, and the group that their id names counts as failed."""
    gate = Gate(max_staleness=0, groups_per_step=1)
    await admit_all(gate, 1)()
    collector = await collector_of(bus, gate, tiny_model_path)()
    await bus.publish(bus.groups, b"\xc1 garbage", message_id=f"{RUN}/0/0/a")
    await publish(bus, make_group(tiny_model_path, index=1, version=1))
    async with running(collector), asyncio.timeout(20):
        (finished,) = await collector.next_batch(1, admit_all(gate, 1))
    assert finished.ready.index == 1
    assert gate.num_dropped == 1
    assert (await bus.jetstream.stream_info(bus.dead.name)).state.messages == 1


async def test_stale_group_that_arrives_while_others_are_admitted(
    collector_of: CollectorOf, bus: Bus, tiny_model_path: Path
) -> None:
    """Publishing a prompt takes time, in which groups arrive: they are checked before the choice, not chosen from."""
    gate = Gate(max_staleness=0, groups_per_step=2)
    await admit_all(gate, 1)()
    collector = await collector_of(bus, gate, tiny_model_path)()
    await publish(bus, make_group(tiny_model_path, index=0, version=1))

    async def admit() -> None:
        await admit_all(gate, 5)()
        if gate.num_rejected == 1:
            await publish(bus, make_group(tiny_model_path, index=1, version=1))
            while gate.outstanding[1].attempt == 0 and not collector.holds(1, 0):
                await asyncio.sleep(0.02)

    async with running(collector), asyncio.timeout(30):
        waiting = asyncio.create_task(collector.next_batch(5, admit))
        while gate.num_rejected < 2:
            assert not waiting.done(), waiting.exception()
            await asyncio.sleep(0.05)
        for index in range(2):
            await publish(bus, make_group(tiny_model_path, index=index, attempt=1, version=5))
        assert [finished.ready.attempt for finished in await waiting] == [1, 1]


async def test_early_stale_group_takes_the_place_of_a_failed_one(
    collector_of: CollectorOf, bus: Bus, tiny_model_path: Path
) -> None:
    """After a restart: a group that the gate had not reached yet is stale when it does; it is rejected, not chosen."""
    gate = Gate(max_staleness=0, groups_per_step=1)
    await admit_all(gate, 5)()
    collector = await collector_of(bus, gate, tiny_model_path)()
    failed = make_group(tiny_model_path, index=0, version=5).prompt
    await publish(bus, make_group(tiny_model_path, index=1, version=1))
    await publish(bus, Group(prompt=failed, samples=(), worker_id="w", error="the image is broken"))
    async with running(collector), asyncio.timeout(30):
        waiting = asyncio.create_task(collector.next_batch(5, admit_all(gate, 5)))
        while gate.num_rejected < 1:
            assert not waiting.done(), waiting.exception()
            await asyncio.sleep(0.05)
        await publish(bus, make_group(tiny_model_path, index=1, attempt=1, version=5))
        (finished,) = await waiting
    assert (finished.ready.index, finished.ready.attempt) == (1, 1)


async def test_copy_that_arrives_during_training_is_a_duplicate(
    collector_of: CollectorOf, bus: Bus, tiny_model_path: Path
) -> None:
    """It is neither held for ever nor trained again, and its message is settled with the group's."""
    gate = Gate(max_staleness=0, groups_per_step=1)
    await admit_all(gate, 1)()
    collector = await collector_of(bus, gate, tiny_model_path)()
    group = make_group(tiny_model_path, index=0, version=1)
    await publish(bus, group)
    async with running(collector), asyncio.timeout(20):
        await collector.next_batch(1, admit_all(gate, 1))
        await publish(bus, group, copy="/again")
        while collector.num_duplicate < 1:
            await asyncio.sleep(0.05)
        gate.trained([0])
        assert len(collector.take_unsettled()) == 2


async def test_caught_up_means_that_everything_stored_is_here(
    collector_of: CollectorOf, bus: Bus, tiny_model_path: Path
) -> None:
    """What was on the bus before the start is held when the wait ends."""
    gate = Gate(max_staleness=0, groups_per_step=3)
    await admit_all(gate, 1)()
    for index in range(3):
        await publish(bus, make_group(tiny_model_path, index=index, version=1))
    collector = await collector_of(bus, gate, tiny_model_path)()
    async with running(collector), asyncio.timeout(20):
        await collector.wait_until_caught_up()
        assert all(collector.holds(index, 0) for index in range(3))
