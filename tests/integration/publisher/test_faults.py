"""WeightPublisher: whatever becomes of one replica, the others get the version, and nothing hangs."""

import asyncio
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.bus.connection import Bus
from penstock.v1 import common_pb2
from services.rollout.testing.memory_sink import Fault
from services.rollout.testing.simulated_replica import simulated_replica
from services.trainer.weight_sync import collective_push
from tests.support.waiting import promptly, until
from tests.support.weights.publishing import (
    assert_serving,
    digests,
    kept_current,
    publishing,
    replicas_of,
    snapshot,
    steps_of,
    until_healed,
    until_reached,
    until_serving,
)

pytestmark = pytest.mark.usefixtures("replica_forkserver", "rendezvous")

DEADLINE_S = 5.0
"""Of the stage at which a test makes a replica hang."""


@pytest.mark.parametrize(
    "point",
    ["GetReplica", "prepare", "join", "pause", "receive", "bucket", "verify", "commit"],
)
async def test_a_killed_replica_costs_the_others_nothing(bus: Bus, point: str) -> None:
    """kill -9 at any point: no deadline is waited for, the others serve the version, the failure is counted."""
    async with (
        replicas_of(bus, 2) as replicas,
        simulated_replica(bus, replica_id="engine-0-dying", **{point: Fault("die")}),
        publishing(bus) as publisher,
    ):
        report = await promptly(publisher.publish(snapshot(1)))
        assert (report.num_replicas, report.num_failed) == (2, 1)
        for replica in replicas:
            await assert_serving(replica, 1)
            assert (await replica.report()).serving_digests[-1:] == [digests(1)]


@pytest.mark.parametrize(
    ("point", "setting"),
    [
        pytest.param("GetReplica", "stage_timeout_s", marks=pytest.mark.slow),
        ("prepare", "stage_timeout_s"),
        pytest.param("join", "stage_timeout_s", marks=pytest.mark.slow),
        pytest.param("pause", "stage_timeout_s", marks=pytest.mark.slow),
        pytest.param("receive", "transfer_timeout_s", marks=pytest.mark.slow),
        ("bucket", "transfer_timeout_s"),
        pytest.param("verify", "transfer_timeout_s", marks=pytest.mark.slow),
        pytest.param("commit", "transfer_timeout_s", marks=pytest.mark.slow),
    ],
)
async def test_a_hung_replica_costs_one_deadline(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, point: str, setting: str
) -> None:
    """Of all deadlines only that one can pass within a test. The others serve the version after it, and the one that
    hung is brought there when it is well again."""
    deadline_s = DEADLINE_S
    if point in ("prepare", "join", "receive", "bucket"):
        # Each waits for the other there: the healthy one fails only when its group is closed, and before its deadline.
        deadline_s = 2 * DEADLINE_S
        monkeypatch.setattr(collective_push, "_OWN_SHARE", 0.4)
    async with (
        replicas_of(bus, 1) as (first,),
        simulated_replica(bus, replica_id="engine-9", **{point: Fault("hang")}) as second,
        publishing(bus, **{setting: deadline_s}) as publisher,
    ):
        report = await promptly(publisher.publish(snapshot(1)))
        assert (report.num_replicas, report.num_failed) == (1, 1)
        await assert_serving(first, 1)
        async with kept_current(publisher):
            await until_serving(second, 1)


@pytest.mark.slow
async def test_a_hung_relay_is_tried_again_alone(bus: Bus) -> None:
    """Gloo passes buckets on from member to member; one that waited for the hung one is not starved by it."""
    async with replicas_of(bus, 3) as replicas, publishing(bus, transfer_timeout_s=DEADLINE_S) as publisher:
        await replicas[0].set_faults(receive=Fault("hang", times=100))
        report = await publisher.publish(snapshot(1))
        assert report.num_failed >= 1
        assert report.num_replicas + report.num_failed == 3
        async with kept_current(publisher):
            for replica in replicas[1:]:
                await until_serving(replica, 1)
            assert (await publisher.publish(snapshot(2))).num_replicas >= 1
            await replicas[0].set_faults()
            for replica in replicas:
                await until_serving(replica, 2)


async def test_no_replica_waits_for_the_digests_of_another(bus: Bus) -> None:
    """Once it has the weights of a broadcast and has proven it, it serves them."""
    async with replicas_of(bus, 2) as (first, second), publishing(bus) as publisher:
        await second.set_faults(verify=Fault("hold"))
        push = asyncio.create_task(publisher.publish(snapshot(1)))
        await until_serving(first, 1)
        assert (await second.report()).state == common_pb2.REPLICA_STATE_UPDATING
        assert not push.done()
        await second.set_faults()
        report = await promptly(push)
        assert (report.num_replicas, report.num_failed) == (2, 0)
        await assert_serving(second, 1)


async def test_a_replica_that_refuses_is_left_out(bus: Bus) -> None:
    """At once, whatever the stage, and the others go on."""
    async with replicas_of(bus, 3) as replicas, publishing(bus) as publisher:
        for version, point in enumerate(("prepare", "receive", "commit"), start=1):
            await replicas[1].set_faults(**{point: Fault("refuse")})
            report = await promptly(publisher.publish(snapshot(version)))
            assert (report.num_replicas, report.num_failed) == (2, 1)
            for replica in (replicas[0], replicas[2]):
                await assert_serving(replica, version)
            async with kept_current(publisher):
                await until_serving(replicas[1], version)
                await until_healed(publisher)


async def test_a_corrupt_replica_is_not_resumed_until_it_is_healed(bus: Bus) -> None:
    """One bit of one value, twice: refused, BROKEN, tried again after retry_after_s; it never serves wrong weights."""
    async with replicas_of(bus, 2) as (first, second), publishing(bus, retry_after_s=1.0) as publisher:
        await publisher.publish(snapshot(1))
        await second.set_faults(verify=Fault("corrupt", times=2))
        with capture_logs() as events:
            report = await publisher.publish(snapshot(2))
        assert (report.num_replicas, report.num_failed) == (1, 1)
        names = [event["event"] for event in events]
        assert (names.count("push.repeated"), names.count("replica.quarantined")) == (1, 1)
        await assert_serving(first, 2)
        said = await second.report()
        assert (said.state, said.version) == (common_pb2.REPLICA_STATE_BROKEN, 1)
        [quarantined] = [event for event in events if event["event"] == "replica.quarantined"]
        assert quarantined["retry_after_s"] == 1.0
        async with kept_current(publisher):
            await until_serving(second, 2)
        assert (await second.report()).serving_digests == [digests(1), digests(2)]
        assert (await first.report()).num_paused == 2  # the healing has not disturbed it


async def test_a_push_whose_checksum_is_wrong_is_repeated(bus: Bus) -> None:
    """Once, at once, with that replica alone; the others do not pause again."""
    async with replicas_of(bus, 2) as (first, second), publishing(bus) as publisher:
        await second.set_faults(verify=Fault("corrupt"))
        report = await publisher.publish(snapshot(1))
        assert (report.num_replicas, report.num_failed) == (2, 0)
        assert (await second.report()).serving_digests == [digests(1)]
        assert (await first.report()).num_paused == 1


async def test_one_that_fails_again_and_again_is_tried_less_often(bus: Bus) -> None:
    """Each failure doubles the wait, and the published versions go to the others meanwhile."""
    async with replicas_of(bus, 2) as (first, second), publishing(bus, retry_after_s=0.2) as publisher:
        await second.set_faults(prepare=Fault("refuse", times=100))

        def waits_s() -> list[float]:
            return [event["retry_after_s"] for event in events if event["event"] == "push.replica_failed"]

        with capture_logs() as events:
            async with kept_current(publisher):
                for version in (1, 2, 3):
                    assert (await publisher.publish(snapshot(version))).num_replicas == 1
                    await until(lambda version=version: len(waits_s()) > version)
        assert waits_s()[:4] == [0.2, 0.4, 0.8, 1.6]
        await assert_serving(first, 3)
        async with kept_current(publisher):
            await second.set_faults()
            await until_serving(second, 3)


@pytest.mark.parametrize("point", ["GetReplica", "prepare", "join", "pause", "receive"])
async def test_a_publication_does_not_wait_for_one_that_fails_again(bus: Bus, point: str) -> None:
    """The try that hangs is broken off, counts as none, and comes again after the publication."""
    async with replicas_of(bus, 2) as (first, second), publishing(bus, retry_after_s=0.2) as publisher:
        await second.set_faults(prepare=Fault("refuse"))
        assert (await publisher.publish(snapshot(1))).num_failed == 1
        await second.set_faults(**{point: Fault("hang", times=100)})
        seen = await steps_of(second, point)
        async with kept_current(publisher):
            await until_reached(second, point, seen)
            with capture_logs() as events:
                report = await promptly(publisher.publish(snapshot(2)))
            assert (report.num_replicas, report.num_failed) == (1, 0)
            await assert_serving(first, 2)
            names = [event["event"] for event in events]
            assert (names.count("push.retry_interrupted"), names.count("push.replica_failed")) == (1, 0)
            await second.set_faults()
            assert (await publisher.publish(snapshot(3))).num_replicas >= 1
            await until_serving(second, 3)


@pytest.mark.slow
async def test_a_replica_that_is_slower_than_a_step_comes_back(bus: Bus) -> None:
    """Two publications interrupt its retry; the third waits for it, and then brings the replica up to date."""
    async with replicas_of(bus, 2) as (first, second), publishing(bus, retry_after_s=0.1) as publisher:
        await second.set_faults(prepare=Fault("refuse"))
        assert (await publisher.publish(snapshot(1))).num_failed == 1
        await second.set_faults(receive=Fault("hold", times=100))
        async with kept_current(publisher):
            for seen, version in enumerate((2, 3)):
                await until_reached(second, "receive", seen)
                assert (await publisher.publish(snapshot(version))).num_replicas == 1
            await until_reached(second, "receive", 2)
            with capture_logs() as events:
                publication = asyncio.create_task(publisher.publish(snapshot(4)))
                await until(lambda: "push.retry_awaited" in [event["event"] for event in events])
                assert not publication.done()
                await second.set_faults()
                assert (await publication).num_replicas == 2
            assert "push.retry_interrupted" not in [event["event"] for event in events]
        for replica in (first, second):
            await assert_serving(replica, 4)


async def test_a_retry_that_is_interrupted_costs_its_replica_the_process_group(bus: Bus, tmp_path: Path) -> None:
    """It went over files, and the replica left the group of the last broadcast when it was told; the next broadcast
    takes another."""
    files = tmp_path / "files"
    async with replicas_of(bus, 1) as (replica,), publishing(bus, files_dir=files, retry_after_s=0.1) as publisher:
        assert (await publisher.publish(snapshot(1))).num_replicas == 1
        await until(lambda: publisher.files.folder_of(1) is not None)  # else the next version may not be written
        await replica.set_faults(GetReplica=Fault("refuse"), receive=Fault("hang", times=100))
        assert (await publisher.publish(snapshot(2))).num_failed == 1
        await until(lambda: publisher.files.folder_of(2) is not None)
        async with kept_current(publisher):
            await until_reached(replica, "receive", 1)
            shutil.rmtree(files)
            files.touch()  # no version is written any more
            with capture_logs() as events:
                await publisher.publish(snapshot(3))
                await replica.set_faults()
                await until_serving(replica, 3)
        names = [event["event"] for event in events]
        assert (names.count("push.retry_interrupted"), names.count("push.replica_failed")) == (1, 0)
        groups = (await replica.report()).groups
        assert len(groups) == len(set(groups)) == 2
