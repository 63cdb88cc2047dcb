"""WeightPublisher: every live replica gets exactly the trainer's bytes, once, and keeps up with what is published."""

import asyncio
import contextlib

import pytest

from penstock.bus.connection import Bus
from penstock.config import BusConfig
from penstock.errors import SetupError
from penstock.testing.local_bus import temporary_run
from penstock.v1 import common_pb2
from services.rollout.testing.memory_sink import Fault
from services.rollout.testing.simulated_replica import simulated_replica, weights_of
from services.trainer.weight_sync import publisher as publisher_module
from tests.support.waiting import HANG_S, promptly
from tests.support.weights.publishing import (
    FixedWatch,
    assert_serving,
    digests,
    kept_current,
    lose,
    publishing,
    replicas_of,
    snapshot,
    until_reached,
    until_seen,
    until_serving,
)

pytestmark = pytest.mark.usefixtures("replica_forkserver", "rendezvous")


async def test_every_replica_gets_exactly_the_trainers_bytes(bus: Bus) -> None:
    """Several buckets, two dtypes, odd sizes; the report counts what happened."""
    async with replicas_of(bus, 3) as replicas, publishing(bus) as publisher:
        weights = snapshot(1)
        assert len(weights.buckets) >= 2
        report = await publisher.publish(weights)
        assert (report.version, report.num_replicas, report.num_failed) == (1, 3, 0)
        assert report.num_bytes == sum(t.numel() * t.element_size() for t in weights_of(1).values())
        assert report.paused_s.keys() == {replica.replica_id for replica in replicas}
        assert 0 < report.pause_s <= report.longest_pause[1] <= report.push_s
        for replica in replicas:
            said = await replica.report()
            assert (said.version, said.state) == (1, common_pb2.REPLICA_STATE_READY)
            assert said.digests == digests(1)
            assert (said.num_paused, said.serving_digests) == (1, [digests(1)])


async def test_the_group_is_kept_while_membership_stays(bus: Bus) -> None:
    """No new rendezvous from push to push; another replica, or one less, opens a new epoch for all."""
    async with replicas_of(bus, 2) as (first, second), publishing(bus) as publisher:
        for version in (1, 2, 3):  # at once one after the other: leases may still tell of the push before
            assert (await publisher.publish(snapshot(version))).num_replicas == 2
        groups = (await first.report()).groups
        assert len(groups) == 1
        assert groups == (await second.report()).groups
        async with simulated_replica(bus, replica_id="engine-9") as third:
            await until_seen(publisher, lambda values: "engine-9" in values)
            assert (await publisher.publish(snapshot(4))).num_replicas == 3
            for replica in (first, second, third):
                said = await replica.report()
                assert said.digests == digests(4)
            assert len((await first.report()).groups) == 2
            assert (await first.report()).groups[-1] == (await third.report()).groups[-1]
            await lose(bus, third)
        await until_seen(publisher, lambda values: "engine-9" not in values)
        assert (await publisher.publish(snapshot(5))).num_replicas == 2
        assert len(set((await first.report()).groups)) == 3


async def test_a_late_joiner_is_brought_to_the_published_version(bus: Bus) -> None:
    """Without another publication, and without a pause for those that have it; then nothing more is pushed."""
    async with publishing(bus) as publisher, kept_current(publisher):
        report = await promptly(publisher.publish(snapshot(7)))
        assert (report.num_replicas, report.num_failed, report.pause_s) == (0, 0, 0.0)
        async with replicas_of(bus, 1) as (first,):
            await until_serving(first, 7)
            async with simulated_replica(bus, replica_id="engine-9") as second:
                await until_serving(second, 7)
                async with simulated_replica(bus, replica_id="engine-10") as third:  # the catch-up looks at all again
                    await until_serving(third, 7)
                assert (await second.report()).num_paused == 1
            assert (await first.report()).num_paused == 1


async def test_one_that_joins_while_the_catch_up_pauses_is_seen(
    bus_config: BusConfig, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the pause, not at the next look without news, and no renewed lease is needed for it."""
    monkeypatch.setattr(publisher_module, "_LOOK_EVERY_S", 2.0)
    monkeypatch.setattr(publisher_module, "_CATCH_UP_EVERY_S", 10 * HANG_S)
    patient = bus_config.model_copy(update={"lease_ttl_s": 10 * HANG_S})
    async with temporary_run(patient, run_name) as bus, publishing(bus) as publisher, kept_current(publisher):
        await publisher.publish(snapshot(3))
        async with replicas_of(bus, 1) as (first,):
            await until_serving(first, 3)
            async with simulated_replica(bus, replica_id="engine-9") as second:
                await until_serving(second, 3)


async def test_one_that_is_loading_or_draining_is_left_alone(bus: Bus) -> None:
    """It is pushed to when it says that it is ready."""
    loading, draining = common_pb2.REPLICA_STATE_STARTING, common_pb2.REPLICA_STATE_DRAINING
    async with (
        simulated_replica(bus, state=loading) as first,
        simulated_replica(bus, state=draining) as second,
        publishing(bus) as publisher,
        kept_current(publisher),
    ):
        report = await publisher.publish(snapshot(1))
        assert (report.num_replicas, report.num_failed) == (0, 0)
        assert publisher.num_live_replicas == 1
        async with simulated_replica(bus) as well:
            await until_serving(well, 1)
        assert not (await first.report()).calls
        assert not (await second.report()).calls
        await first.set_state(0)
        await until_serving(first, 1)
        assert not (await second.report()).calls


async def test_a_drain_that_the_lease_does_not_tell_yet_is_no_failure(bus: Bus) -> None:
    """The replica's own word counts."""
    async with replicas_of(bus, 2) as (first, second), publishing(bus) as publisher:
        stale = dict(publisher.replicas.values)
        await second.set_state(common_pb2.REPLICA_STATE_DRAINING)
        publisher.replicas = FixedWatch(stale)  # type: ignore[assignment]
        report = await publisher.publish(snapshot(1))
        assert (report.num_replicas, report.num_failed) == (1, 0)
        await assert_serving(first, 1)


async def test_a_lease_whose_holder_was_replaced_is_not_pushed_to(bus: Bus) -> None:
    """An engine that was killed and started again at its address has two leases for a while; it is pushed to once."""
    async with simulated_replica(bus, replica_id="engine-old") as old, publishing(bus) as publisher:
        port = int(old.address.rpartition(":")[2])
        stale = dict(publisher.replicas.values)
        old.kill()
        async with simulated_replica(bus, replica_id="engine-new", port=port) as new:
            await until_seen(publisher, lambda values: "engine-new" in values)
            publisher.replicas = FixedWatch(stale | publisher.replicas.values)  # type: ignore[assignment]
            report = await promptly(publisher.publish(snapshot(1)))
            assert (report.num_replicas, report.num_failed) == (1, 1)
            await assert_serving(new, 1)


async def test_an_unreadable_lease_stops_nobody(bus: Bus) -> None:
    """Neither a publication nor the catch-up."""
    bucket = await bus.bucket("replicas", ttl_s=bus.config.lease_ttl_s)
    await bucket.put("engine-odd", b"{ no json")
    async with replicas_of(bus, 1) as (first,), publishing(bus) as publisher, kept_current(publisher):
        await bucket.put("engine-odd", b"{ no json")
        assert (await publisher.publish(snapshot(1))).num_replicas == 1
        await assert_serving(first, 1)


async def test_a_publication_waits_for_a_catch_up_that_runs(bus: Bus) -> None:
    """They never mix: the replica gets the one version whole, and then the other."""
    async with publishing(bus) as publisher, kept_current(publisher):
        await publisher.publish(snapshot(1))
        async with replicas_of(bus, 1) as (first,):
            await until_reached(first, "prepare", 0)
            report = await publisher.publish(snapshot(2))
            assert (report.version, report.num_replicas) == (2, 1)
            said = await first.report()
            assert said.serving_digests == [digests(1), digests(2)]


@pytest.mark.parametrize("point", ["GetReplica", "join", "pause", "receive", "verify"])
async def test_a_push_that_is_cancelled_ends_at_once(bus: Bus, point: str) -> None:
    """It leaves no thread behind, and the replicas are told; another publisher may push to them right away."""
    async with replicas_of(bus, 2) as (first, second):
        async with publishing(bus) as publisher:
            await second.set_faults(**{point: Fault("hang")})
            task = asyncio.create_task(publisher.publish(snapshot(1)))
            await until_reached(second, point, 0)
            assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await promptly(task)
            await promptly(publisher.close())
        async with publishing(bus) as publisher:
            assert (await publisher.publish(snapshot(2))).num_replicas == 2
            for replica in (first, second):
                await assert_serving(replica, 2)


@pytest.mark.slow
@pytest.mark.timeout(HANG_S)
def test_a_loop_that_is_cancelled_in_a_rendezvous_ends(nats_url: str, run_name: str) -> None:
    """No thread is left behind that waits for somebody's deadline: `asyncio.run` waits for all of them."""
    from penstock.bus.connection import connect
    from penstock.config import BusConfig

    async def play() -> None:
        async with connect(BusConfig(url=nats_url, lease_ttl_s=60.0), run=run_name) as bus:
            async with simulated_replica(bus, join=Fault("hang")) as replica, publishing(bus) as publisher:
                task = asyncio.create_task(publisher.publish(snapshot(1)))
                await until_reached(replica, "join", 0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await bus.jetstream.delete_key_value(f"{run_name}_replicas")

    asyncio.run(play())


@pytest.mark.slow
async def test_an_address_that_is_not_this_machines_is_said_so(bus: Bus) -> None:
    """The error names the setting to change."""
    async with replicas_of(bus, 1), publishing(bus, host="192.0.2.1") as publisher:
        with pytest.raises(SetupError, match=r"network\.advertise_host"):
            await publisher.publish(snapshot(1))
