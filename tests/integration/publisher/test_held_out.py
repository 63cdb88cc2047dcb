"""Replicas that an evaluation holds out: they keep its version, are replaced with its weights, and catch up."""

import asyncio
from pathlib import Path

import pytest

from penstock.bus.connection import Bus
from penstock.runtime.process import end_task
from services.rollout.testing.memory_sink import Fault
from services.trainer.evaluation.holding import ReplicaHolding
from services.trainer.weight_sync.held_out.hold_out import HoldOut
from services.trainer.weight_sync.held_out.kept_weights import KeptWeights
from services.trainer.weight_sync.held_out.record import open_held_out_record
from services.trainer.weight_sync.publisher import WeightPublisher
from services.trainer.weight_sync.snapshot import WeightSnapshot
from tests.support.waiting import promptly, until
from tests.support.weights.publishing import (
    assert_serving,
    kept_current,
    lose,
    publishing,
    replicas_of,
    snapshot,
    until_seen,
    until_serving,
)

pytestmark = pytest.mark.usefixtures("replica_forkserver", "rendezvous")


async def until_known(publisher: WeightPublisher, version: int) -> None:
    """The publisher has heard that every replica holds the version: of equal ones it holds out the first by id."""
    await until(lambda: all(replica.policy_version == version for replica in publisher._pool.sound()))


async def hold_out_of(bus: Bus, folder: Path, weights: WeightSnapshot) -> HoldOut:
    """The claim of an evaluation of `weights` on one replica."""
    record = await open_held_out_record(bus, trainer_epoch="a")
    return HoldOut(step=4, kept=KeptWeights.write(folder / "weights", weights), num=1, record=record)


async def test_a_held_out_replica_keeps_its_version_and_then_catches_up(bus: Bus, tmp_path: Path) -> None:
    """As a late joiner does; routers read who it is, before anybody is pushed to."""
    async with (
        replicas_of(bus, 2) as (first, second),
        publishing(bus, transport="shared_memory") as publisher,
        kept_current(publisher),
    ):
        await publisher.publish(snapshot(1, shared=True))
        await until_known(publisher, 1)
        hold_out = await hold_out_of(bus, tmp_path, snapshot(1))
        assert publisher.can_hold_out(1, version=1)
        assert await promptly(publisher.hold_out(hold_out))
        read = (await open_held_out_record(bus, trainer_epoch="b")).value
        assert (list(read.replica_ids), read.policy_version, read.step) == ([first.replica_id], 1, 4)
        for version in (2, 3):
            report = await publisher.publish(snapshot(version, shared=True))
            assert (report.num_replicas, report.num_failed) == (1, 0)
            await assert_serving(second, version)
            await assert_serving(first, 1)
        await publisher.release_held_out()
        await until_serving(first, 3)


@pytest.mark.parametrize(
    ("transport", "load"),
    [
        pytest.param("shared_memory", "disk", marks=pytest.mark.slow),
        pytest.param("broadcast", "disk", marks=pytest.mark.variant),
        pytest.param("delta", "disk", marks=pytest.mark.variant),
        ("broadcast", "broadcast"),
        pytest.param("delta", "whole", marks=pytest.mark.slow),
    ],
)
async def test_one_that_dies_is_replaced_by_one_with_newer_weights(
    bus: Bus, tmp_path: Path, transport: str, load: str
) -> None:
    """It reads the kept file if it sees it, or gets the weights over the transport; the others train on."""
    shared = transport == "shared_memory"
    async with (
        replicas_of(bus, 3) as (first, second, third),
        publishing(bus, transport=transport) as publisher,
        kept_current(publisher),
    ):
        await publisher.publish(snapshot(1, shared=shared))
        await until_known(publisher, 1)
        hold_out = await hold_out_of(bus, tmp_path, snapshot(1))
        assert await promptly(publisher.hold_out(hold_out))
        await publisher.publish(snapshot(2, shared=shared))
        if load != "disk":
            await second.set_faults(prepare=Fault("refuse"))  # it does not see the trainer's folder
        await lose(bus, first)
        await until_serving(second, 1)
        assert hold_out.replica_ids == {second.replica_id}
        assert (await second.report()).loads[-1] == load
        await publisher.publish(snapshot(3, shared=shared))
        await assert_serving(second, 1)
        await assert_serving(third, 3)
        await publisher.release_held_out()
        await until_serving(second, 3)


async def test_one_replica_is_not_spared(bus: Bus, tmp_path: Path) -> None:
    """Nothing is held out then, and it gets the next version."""
    async with replicas_of(bus, 1) as (only,), publishing(bus, transport="shared_memory") as publisher:
        await publisher.publish(snapshot(1, shared=True))
        await until_known(publisher, 1)
        assert not publisher.can_hold_out(1, version=1)
        assert not await publisher.hold_out(await hold_out_of(bus, tmp_path, snapshot(1)))
        assert (await publisher.publish(snapshot(2, shared=True))).num_replicas == 1
        await assert_serving(only, 2)


@pytest.mark.slow
async def test_a_trainer_that_starts_again_pushes_no_more_to_what_was_held_out(bus: Bus, tmp_path: Path) -> None:
    """Its first publication already leaves the replica out; it reads the weights back if that one has died."""
    async with replicas_of(bus, 2) as (first, second):
        async with publishing(bus, transport="shared_memory") as publisher:
            await publisher.publish(snapshot(1, shared=True))
            await until_known(publisher, 1)
            hold_out = await hold_out_of(bus, tmp_path, snapshot(1))
            await publisher.hold_out(hold_out)
        async with publishing(bus, transport="shared_memory") as publisher, kept_current(publisher):
            record = await open_held_out_record(bus, trainer_epoch="b")
            kept = KeptWeights.find(tmp_path / "weights")
            assert kept == hold_out.kept
            again = HoldOut(step=4, kept=kept, num=1, record=record, replica_ids=frozenset(record.value.replica_ids))
            await publisher.go_on_holding_out(again)
            await publisher.publish(snapshot(5, shared=True))
            await assert_serving(first, 1)
            await assert_serving(second, 5)
            await lose(bus, first)
            await until_serving(second, 1)


@pytest.mark.slow
@pytest.mark.parametrize("look", ["waits for the lock", "has the lock"])
async def test_the_end_of_an_evaluation_ends_the_replacement_of_replicas(bus: Bus, tmp_path: Path, look: str) -> None:
    """One that dies while weights are pushed is not replaced after the end: routers would call its heir no more."""
    async with replicas_of(bus, 3) as (first, second, third), publishing(bus, transport="shared_memory") as publisher:
        await publisher.publish(snapshot(1, shared=True))
        await until_known(publisher, 1)
        record = await open_held_out_record(bus, trainer_epoch="a")
        holding = ReplicaHolding(publisher, record, run_folder=tmp_path, num=1)
        hold_out = await promptly(holding.begin(4, 1))
        assert hold_out is not None
        await publisher.publish(snapshot(2, shared=True))
        async with publisher._lock:  # as a publication has it
            await lose(bus, first)
            await until_seen(publisher, lambda leases: first.replica_id not in leases)
            looking = asyncio.create_task(publisher.keep_current())
            if look == "waits for the lock":
                await until(lambda: publisher._lock._waiters)
                ending = asyncio.create_task(holding.end(4))
                await until(lambda: not record.value.policy_version or len(publisher._lock._waiters or ()) == 2)
        if look == "has the lock":
            await until(lambda: hold_out.replica_ids != {first.replica_id})
            ending = asyncio.create_task(holding.end(4))
        await promptly(ending)
        for replica in (second, third):
            await until_serving(replica, 2)
        await end_task(looking)
        assert not (await open_held_out_record(bus, trainer_epoch="b")).value.policy_version
        await publisher.publish(snapshot(3, shared=True))
        for replica in (second, third):
            await assert_serving(replica, 3)
