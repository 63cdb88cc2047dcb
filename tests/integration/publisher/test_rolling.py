"""Pushes that replicas fetch by themselves: each pauses for its own part only, and a few begin at a time."""

import asyncio
from pathlib import Path

import pytest

from penstock.bus.buckets.replica_lease import write_replica
from penstock.bus.connection import Bus
from penstock.v1 import common_pb2
from services.rollout.testing.memory_sink import Fault
from services.rollout.testing.simulated_replica import SimulatedReplica, simulated_replica
from services.trainer.weight_sync import rolling_push
from services.trainer.weight_sync.publisher import WeightPublisher
from services.trainer.weight_sync.push_report import PushReport
from services.trainer.weight_sync.snapshot import WeightSnapshot
from tests.support.waiting import HANG_S, promptly, until
from tests.support.weights.publishing import (
    assert_serving,
    publishing,
    replicas_of,
    snapshot,
    until_reached,
    until_serving,
)

pytestmark = pytest.mark.usefixtures("replica_forkserver", "rendezvous")


def start(publisher: WeightPublisher, weights: WeightSnapshot) -> "asyncio.Task[PushReport]":
    return asyncio.create_task(publisher.publish(weights))


async def calls_of(replica: SimulatedReplica) -> list[str]:
    return (await replica.report()).calls


@pytest.mark.parametrize(
    ("transport", "point"),
    [
        ("shared_memory", "prepare"),
        ("shared_memory", "pause"),
        ("shared_memory", "verify"),
        ("disk", "receive"),
        ("delta", "upload"),
    ],
)
async def test_a_replica_serves_while_another_is_slow(bus: Bus, tmp_path: Path, transport: str, point: str) -> None:
    """It is done with the push whatever the other does; the publication is not, so nothing is announced yet."""
    async with (
        replicas_of(bus, 2) as (first, second),
        publishing(bus, files_dir=tmp_path, transport=transport) as publisher,
    ):
        await second.set_faults(**{point: Fault("hold")})
        push = start(publisher, snapshot(1, shared=transport == "shared_memory"))
        await until_reached(second, point, 0)
        await until_serving(first, 1)
        assert not push.done()
        assert (await second.report()).version == 0
        await second.set_faults()
        report = await promptly(push)
        assert (report.num_replicas, report.num_failed) == (2, 0)
        await assert_serving(second, 1)


async def test_it_is_told_when_half_of_the_replicas_serve(bus: Bus) -> None:
    """Once, while the last of three still loads; not if two of three fail."""
    async with replicas_of(bus, 3) as replicas, publishing(bus, transport="shared_memory") as publisher:
        served: list[int] = []
        await replicas[0].set_faults(receive=Fault("hold"))
        push = asyncio.create_task(publisher.publish(snapshot(1, shared=True), on_half_served=lambda: served.append(1)))
        await until(lambda: bool(served))
        assert [(await each.report()).version for each in replicas] == [0, 1, 1]
        assert not push.done()
        await replicas[0].set_faults()
        await promptly(push)
        for replica in replicas[1:]:
            await replica.set_faults(commit=Fault("refuse"))
        report = await publisher.publish(snapshot(2, shared=True), on_half_served=lambda: served.append(2))
        assert (report.num_replicas, served) == (1, [1])


async def test_replicas_that_are_gone_are_not_among_the_half(bus: Bus) -> None:
    """Their leases outlive them: two of four are dead, one serves and one loads, which is half of those that can."""
    async with replicas_of(bus, 4) as replicas, publishing(bus, transport="shared_memory") as publisher:
        for replica in replicas[:2]:
            replica.kill()
        await replicas[2].set_faults(receive=Fault("hold"))
        served = asyncio.Event()
        push = asyncio.create_task(publisher.publish(snapshot(1, shared=True), on_half_served=served.set))
        await promptly(served.wait())
        assert not push.done()
        await replicas[2].set_faults()
        report = await promptly(push)
        assert (report.num_replicas, report.num_failed) == (2, 2)


async def test_a_push_of_the_trainers_memory_is_one_call(bus: Bus) -> None:
    """Nothing is asked before, so a replica that is frozen keeps no other waiting; an upload needs calls of its own."""
    stages = ["prepare", "pause", "receive", "verify", "commit"]
    async with replicas_of(bus, 2) as (first, second):
        async with publishing(bus, transport="shared_memory") as publisher:
            await second.set_faults(GetReplica=Fault("hang"))
            report = await promptly(publisher.publish(snapshot(1, shared=True)))
            assert (report.num_replicas, report.num_failed) == (2, 0)
            assert await calls_of(first) == stages
        await second.set_faults()
        async with publishing(bus, transport="delta") as publisher:
            assert (await publisher.publish(snapshot(2))).num_replicas == 2
            expected = ["GetReplica", "prepare", "upload", *stages[1:]]
            assert (await calls_of(first))[len(stages) :] == expected


async def test_another_replica_at_the_address_of_one_that_is_gone_takes_no_push_for_it(bus: Bus) -> None:
    """It has a lease of its own, by which it gets its own push, and the failure of the other ends nothing there."""
    async with simulated_replica(bus, replica_id="engine-gone", reported_id="engine-new") as replica:
        own = common_pb2.Replica(replica_id="engine-new", address=replica.address, state=common_pb2.REPLICA_STATE_READY)
        await (await bus.bucket("replicas", ttl_s=bus.config.lease_ttl_s)).put("engine-new", write_replica(own))
        async with publishing(bus, transport="shared_memory") as publisher:
            report = await promptly(publisher.publish(snapshot(1, shared=True)))
        assert (report.num_replicas, report.num_failed) == (1, 1)
        assert await calls_of(replica) == ["prepare", "pause", "receive", "verify", "commit"]
        await assert_serving(replica, 1)


async def test_replicas_that_need_another_transport_are_among_the_half(bus: Bus) -> None:
    """Two of three cannot read the trainer's memory, so one that does is not half of them."""
    async with (
        replicas_of(bus, 1),
        simulated_replica(bus, replica_id="engine-7", elsewhere=True, receive=Fault("hold")) as first,
        simulated_replica(bus, replica_id="engine-8", elsewhere=True) as second,
        publishing(bus, transport="shared_memory") as publisher,
    ):
        served: list[int] = []
        push = asyncio.create_task(publisher.publish(snapshot(1, shared=True), on_half_served=lambda: served.append(1)))
        await until_reached(first, "receive", 0)
        assert served == []
        await first.set_faults()
        report = await promptly(push)
        assert (report.num_replicas, served) == (3, [1])
        await assert_serving(second, 1)


async def test_it_is_told_when_half_of_the_replicas_serve_a_broadcast(bus: Bus) -> None:
    """While the other of two still computes its digests."""
    served: list[int] = []
    async with replicas_of(bus, 2) as (first, second), publishing(bus) as publisher:
        await second.set_faults(verify=Fault("hold"))
        push = asyncio.create_task(publisher.publish(snapshot(1), on_half_served=lambda: served.append(1)))
        await until(lambda: served == [1])
        await assert_serving(first, 1)
        assert not push.done()
        await second.set_faults()
        assert (await promptly(push)).num_replicas == 2
    assert served == [1]


async def test_replicas_generate_until_their_turn_comes(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time: the second hears nothing until the first is done with the push, or has failed in it."""
    monkeypatch.setattr(rolling_push, "_AT_ONCE", 1)
    monkeypatch.setattr(rolling_push, "_PATIENCE_S", 10 * HANG_S)
    async with replicas_of(bus, 2) as (first, second), publishing(bus, transport="shared_memory") as publisher:
        for version, end in enumerate(("continue", "fail"), start=1):
            await first.set_faults(receive=Fault("hold"), commit=Fault("refuse", times=version - 1))
            before = await calls_of(second)
            push = start(publisher, snapshot(version, shared=True))
            await until_reached(first, "receive", version - 1)
            assert (await calls_of(second))[len(before) :] == []
            assert (await second.report()).state == common_pb2.REPLICA_STATE_READY
            await first.set_faults(commit=Fault("refuse", times=version - 1))
            report = await promptly(push)
            assert (report.num_replicas, report.num_failed) == ((2, 0) if end == "continue" else (1, 1))
            await assert_serving(second, version)


async def test_more_begin_while_those_that_have_begun_are_busy(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs in its load delays the others by the patience, not by its deadline."""
    monkeypatch.setattr(rolling_push, "_AT_ONCE", 1)
    async with replicas_of(bus, 3) as replicas, publishing(bus, transport="shared_memory") as publisher:
        await replicas[0].set_faults(receive=Fault("hold"))
        push = start(publisher, snapshot(1, shared=True))
        for replica in replicas[1:]:
            await until_serving(replica, 1)
        assert not push.done()
        await replicas[0].set_faults()
        assert (await promptly(push)).num_replicas == 3


async def test_a_cancelled_push_ends_where_it_is(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is done keeps the version, who is in the middle is told, who has not begun hears nothing."""
    monkeypatch.setattr(rolling_push, "_AT_ONCE", 1)
    async with replicas_of(bus, 3) as (first, second, third):
        async with publishing(bus, transport="shared_memory") as publisher:
            monkeypatch.setattr(rolling_push, "_PATIENCE_S", 10 * HANG_S)
            await second.set_faults(receive=Fault("hang"))
            push = start(publisher, snapshot(1, shared=True))
            await until_reached(second, "receive", 0)
            push.cancel()
            with pytest.raises(asyncio.CancelledError):
                await promptly(push)
        assert (await calls_of(second))[-1] == "AbortWeights"
        assert await calls_of(third) == []
        await assert_serving(first, 1)
        async with publishing(bus, transport="shared_memory") as publisher:
            assert (await publisher.publish(snapshot(2, shared=True))).num_replicas == 3
            for replica in (first, second, third):
                await assert_serving(replica, 2)
