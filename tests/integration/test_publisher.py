"""WeightPublisher: whatever becomes of one replica, the others get exactly the trainer's bytes, and nothing hangs."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from penstock.bus.connection import Bus
from penstock.bus.leases import Watch, watched
from penstock.errors import SetupError
from penstock.v1 import common_pb2
from penstock.weights.delta import write_delta
from penstock.weights.digest import tensor_digest
from penstock.weights.snapshot import write_snapshot
from services.trainer.config import PushConfig
from services.trainer.policy.policy_model import load_policy
from services.trainer.push.published_weights import PublishedWeights
from services.trainer.push.publisher import WeightPublisher
from services.trainer.push.snapshots import Snapshots
from tests.simulated_replica import SHAPES, Fault, SimulatedReplica, simulated_replica, weights_of

DEADLINE_S = 2.0
"""Of the stage at which a test makes a replica hang."""
QUICK_S = 3.0
"""A push that waits for no deadline: far less than any of them."""
CONFIG = PushConfig(
    bucket_bytes=8192,
    prepare_timeout_s=30.0,
    pause_timeout_s=30.0,
    transfer_timeout_s=30.0,
    verify_timeout_s=30.0,
    control_timeout_s=10.0,
    retry_after_s=0.5,
)


def snapshot(version: int) -> PublishedWeights:
    return PublishedWeights.take(version, weights_of(version).items(), max_bucket_bytes=CONFIG.bucket_bytes)


def digests(version: int) -> dict[str, int]:
    return {name: tensor_digest(tensor) for name, tensor in weights_of(version).items()}


@asynccontextmanager
async def watching(bus: Bus) -> AsyncIterator[Watch]:
    ttl_s = bus.config.lease_ttl_s
    async with watched(await bus.bucket("replicas", ttl_s=ttl_s), ttl_s=ttl_s) as watch:
        yield watch


@asynccontextmanager
async def publishing(bus: Bus, *, snapshot_dir: Path | None = None, **settings: Any) -> AsyncIterator[WeightPublisher]:
    """A publisher whose replicas' leases are as they are now."""
    async with watching(bus) as watch:
        config = CONFIG.model_copy(update=settings)
        publisher = WeightPublisher(
            config=config,
            replicas=watch,
            backend="gloo",
            snapshots=Snapshots(snapshot_dir, with_deltas=config.transport == "delta"),
        )
        try:
            yield publisher
        finally:
            await asyncio.wait_for(publisher.close(), 10)


@asynccontextmanager
async def kept_current(publisher: WeightPublisher) -> AsyncIterator[None]:
    """With the catch-up running; an error of it fails the test."""
    task = asyncio.create_task(publisher.keep_current())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def replicas_of(bus: Bus, num: int) -> AsyncIterator[list[SimulatedReplica]]:
    """Healthy replicas, in the order of their ids."""
    async with contextlib.AsyncExitStack() as stack:
        names = [f"engine-{index}" for index in range(num)]
        yield [await stack.enter_async_context(simulated_replica(bus, replica_id=name)) for name in names]


async def until_serving(replica: SimulatedReplica, version: int, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            report = await replica.report()
            if (report.version, report.state) == (version, common_pb2.REPLICA_STATE_READY):
                break
            await asyncio.sleep(0.05)
    assert report.digests == digests(version)


async def until_seen(publisher: WeightPublisher, condition: Callable[[dict[str, bytes]], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition(publisher.replicas.values):
            await publisher.replicas.changed(0.1)


async def test_every_replica_gets_exactly_the_trainers_bytes(bus: Bus) -> None:
    """Several buckets, two dtypes, odd sizes; the report counts what happened."""
    async with replicas_of(bus, 3) as replicas, publishing(bus) as publisher:
        weights = snapshot(1)
        assert len(weights.buckets) >= 2
        report = await publisher.publish(weights)
        assert (report.version, report.num_replicas, report.num_failed) == (1, 3, 0)
        assert report.num_bytes == sum(t.numel() * t.element_size() for t in weights_of(1).values())
        assert 0 < report.pause_s <= report.push_s < QUICK_S
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
        await until_seen(publisher, lambda values: "engine-9" not in values)
        assert (await publisher.publish(snapshot(5))).num_replicas == 2
        assert len(set((await first.report()).groups)) == 3


@pytest.mark.parametrize(
    "point",
    [
        "GetReplica", "PrepareWeights", "join", "PauseGeneration", "ReceiveWeights", "bucket", "VerifyWeights",
        "CommitWeights", "ResumeGeneration",
    ],
)  # fmt: skip
async def test_a_killed_replica_costs_the_others_nothing(bus: Bus, point: str) -> None:
    """kill -9 at any point: no deadline is waited for, the others serve the version, the failure is counted."""
    async with (
        replicas_of(bus, 2) as replicas,
        simulated_replica(bus, replica_id="engine-0-dying", **{point: Fault("die")}),
        publishing(bus) as publisher,
    ):
        started = time.monotonic()
        report = await publisher.publish(snapshot(1))
        assert time.monotonic() - started < QUICK_S
        assert (report.num_replicas, report.num_failed) == (2, 1)
        for replica in replicas:
            await until_serving(replica, 1, timeout_s=1)
            assert (await replica.report()).serving_digests[-1:] == [digests(1)]


@pytest.mark.parametrize(
    ("point", "setting"),
    [
        ("GetReplica", "control_timeout_s"),
        ("PrepareWeights", "prepare_timeout_s"),
        ("join", "prepare_timeout_s"),
        ("PauseGeneration", "pause_timeout_s"),
        ("ReceiveWeights", "transfer_timeout_s"),
        ("bucket", "transfer_timeout_s"),
        ("VerifyWeights", "verify_timeout_s"),
        ("CommitWeights", "control_timeout_s"),
        ("ResumeGeneration", "control_timeout_s"),
    ],
)
async def test_a_hung_replica_costs_one_deadline(bus: Bus, point: str, setting: str) -> None:
    """The others serve the version after it, and the one that hung is brought there when it is well again."""
    async with (
        replicas_of(bus, 1) as (first,),
        simulated_replica(bus, replica_id="engine-9", **{point: Fault("hang")}) as second,
        publishing(bus, **{setting: DEADLINE_S}) as publisher,
    ):
        started = time.monotonic()
        report = await publisher.publish(snapshot(1))
        assert time.monotonic() - started < DEADLINE_S + QUICK_S
        assert (report.num_replicas, report.num_failed) == (1, 1)
        await until_serving(first, 1, timeout_s=1)
        async with kept_current(publisher):
            await until_serving(second, 1)


async def test_a_hung_relay_is_tried_again_alone(bus: Bus) -> None:
    """Gloo passes buckets on from member to member; one that waited for the hung one is not starved by it."""
    async with replicas_of(bus, 3) as replicas, publishing(bus, transfer_timeout_s=DEADLINE_S) as publisher:
        await replicas[0].set_faults(ReceiveWeights=Fault("hang", times=100))
        report = await publisher.publish(snapshot(1))
        assert report.num_failed >= 1
        assert report.num_replicas + report.num_failed == 3
        async with kept_current(publisher):
            for replica in replicas[1:]:
                await until_serving(replica, 1)
            assert (await publisher.publish(snapshot(2))).num_replicas >= 1
            await replicas[0].set_faults()
            for replica in replicas:
                await until_serving(replica, 2, timeout_s=30)


async def test_a_replica_that_refuses_is_left_out(bus: Bus) -> None:
    """At once, whatever the stage, and the others go on."""
    async with replicas_of(bus, 3) as replicas, publishing(bus) as publisher:
        for version, point in enumerate(("PrepareWeights", "ReceiveWeights", "CommitWeights"), start=1):
            await replicas[1].set_faults(**{point: Fault("refuse")})
            started = time.monotonic()
            report = await publisher.publish(snapshot(version))
            assert time.monotonic() - started < QUICK_S
            assert (report.num_replicas, report.num_failed) == (2, 1)
            for replica in (replicas[0], replicas[2]):
                await until_serving(replica, version, timeout_s=1)
            async with kept_current(publisher):
                await until_serving(replicas[1], version)


async def test_a_corrupt_replica_is_not_resumed_until_it_is_healed(bus: Bus) -> None:
    """One bit of one value, twice: refused, BROKEN, tried again after retry_after_s; it never serves wrong weights."""
    async with replicas_of(bus, 2) as (first, second), publishing(bus, retry_after_s=1.0) as publisher:
        await publisher.publish(snapshot(1))
        await second.set_faults(VerifyWeights=Fault("corrupt", times=2))
        with capture_logs() as events:
            report = await publisher.publish(snapshot(2))
        assert (report.num_replicas, report.num_failed) == (1, 1)
        names = [event["event"] for event in events]
        assert (names.count("push.repeated"), names.count("replica.quarantined")) == (1, 1)
        await until_serving(first, 2, timeout_s=1)
        said = await second.report()
        assert (said.state, said.version) == (common_pb2.REPLICA_STATE_BROKEN, 1)
        async with kept_current(publisher):
            started = time.monotonic()
            await until_serving(second, 2)
            assert time.monotonic() - started > 0.5
        assert (await second.report()).serving_digests == [digests(1), digests(2)]
        assert (await first.report()).num_paused == 2  # the healing has not disturbed it


async def test_a_push_whose_checksum_is_wrong_is_repeated(bus: Bus) -> None:
    """Once, at once, with that replica alone; the others do not pause again."""
    async with replicas_of(bus, 2) as (first, second), publishing(bus) as publisher:
        await second.set_faults(VerifyWeights=Fault("corrupt"))
        report = await publisher.publish(snapshot(1))
        assert (report.num_replicas, report.num_failed) == (2, 0)
        assert (await second.report()).serving_digests == [digests(1)]
        assert (await first.report()).num_paused == 1


async def test_one_that_fails_again_and_again_is_tried_less_often(bus: Bus) -> None:
    """Each failure doubles the wait, and the published versions go to the others meanwhile."""
    async with replicas_of(bus, 2) as (first, second), publishing(bus, retry_after_s=0.3) as publisher:
        await second.set_faults(PrepareWeights=Fault("refuse", times=100))
        async with kept_current(publisher):
            for version in (1, 2, 3):
                report = await publisher.publish(snapshot(version))
                assert report.num_replicas == 1
                await asyncio.sleep(1)
            tried = (await second.report()).calls.count("PrepareWeights")
            assert 2 <= tried <= 5
            await until_serving(first, 3, timeout_s=1)
            await second.set_faults()
            await until_serving(second, 3)


async def test_a_late_joiner_is_brought_to_the_published_version(bus: Bus) -> None:
    """Without another publication, and without a pause for those that have it; then nothing more is pushed."""
    async with publishing(bus) as publisher, kept_current(publisher):
        started = time.monotonic()
        report = await publisher.publish(snapshot(7))
        assert time.monotonic() - started < 0.5
        assert (report.num_replicas, report.num_failed, report.pause_s) == (0, 0, 0.0)
        async with replicas_of(bus, 1) as (first,):
            await until_serving(first, 7)
            async with simulated_replica(bus, replica_id="engine-9") as second:
                await until_serving(second, 7)
                await asyncio.sleep(1.5)
                assert (await second.report()).num_paused == 1
            assert (await first.report()).num_paused == 1


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
        await asyncio.sleep(1.5)
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
        publisher.replicas = _FixedWatch(stale)  # type: ignore[assignment]
        report = await publisher.publish(snapshot(1))
        assert (report.num_replicas, report.num_failed) == (1, 0)
        await until_serving(first, 1, timeout_s=1)


class _FixedWatch:
    """A watch that has stopped to hear."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values

    async def changed(self, timeout_s: float) -> bool:
        await asyncio.sleep(timeout_s)
        return False


async def test_a_lease_whose_holder_was_replaced_is_not_pushed_to(bus: Bus) -> None:
    """An engine that was killed and started again at its address has two leases for a while; it is pushed to once."""
    async with simulated_replica(bus, replica_id="engine-old") as old, publishing(bus) as publisher:
        port = int(old.address.rpartition(":")[2])
        stale = dict(publisher.replicas.values)
        old.kill()
        async with simulated_replica(bus, replica_id="engine-new", port=port) as new:
            await until_seen(publisher, lambda values: "engine-new" in values)
            publisher.replicas = _FixedWatch(stale | publisher.replicas.values)  # type: ignore[assignment]
            started = time.monotonic()
            report = await publisher.publish(snapshot(1))
            assert time.monotonic() - started < QUICK_S
            assert (report.num_replicas, report.num_failed) == (1, 1)
            await until_serving(new, 1, timeout_s=1)


async def test_an_unreadable_lease_stops_nobody(bus: Bus) -> None:
    """Neither a publication nor the catch-up."""
    bucket = await bus.bucket("replicas", ttl_s=bus.config.lease_ttl_s)
    await bucket.put("engine-odd", b"{ no json")
    async with replicas_of(bus, 1) as (first,), publishing(bus) as publisher, kept_current(publisher):
        await bucket.put("engine-odd", b"{ no json")
        assert (await publisher.publish(snapshot(1))).num_replicas == 1
        await until_serving(first, 1, timeout_s=1)


async def test_a_publication_waits_for_a_catch_up_that_runs(bus: Bus) -> None:
    """They never mix: the replica gets the one version whole, and then the other."""
    async with publishing(bus) as publisher, kept_current(publisher):
        await publisher.publish(snapshot(1))
        async with replicas_of(bus, 1) as (first,):
            async with asyncio.timeout(10):
                while "PrepareWeights" not in (await first.report()).calls:
                    await asyncio.sleep(0.005)
            report = await publisher.publish(snapshot(2))
            assert (report.version, report.num_replicas) == (2, 1)
            said = await first.report()
            assert said.serving_digests == [digests(1), digests(2)]


@pytest.mark.parametrize("point", ["GetReplica", "join", "PauseGeneration", "ReceiveWeights", "VerifyWeights"])
async def test_a_push_that_is_cancelled_ends_at_once(bus: Bus, point: str) -> None:
    """It leaves no thread behind, and the replicas are told; another publisher may push to them right away."""
    async with replicas_of(bus, 2) as (first, second):
        async with publishing(bus) as publisher:
            await second.set_faults(**{point: Fault("hang")})
            task = asyncio.create_task(publisher.publish(snapshot(1)))
            await asyncio.sleep(1.0)
            assert not task.done()
            task.cancel()
            started = time.monotonic()
            with pytest.raises(asyncio.CancelledError):
                await task
            await publisher.close()
            assert time.monotonic() - started < 1.5
        async with publishing(bus) as publisher:
            assert (await publisher.publish(snapshot(2))).num_replicas == 2
            for replica in (first, second):
                await until_serving(replica, 2, timeout_s=1)


def test_a_loop_that_is_cancelled_in_a_rendezvous_ends(nats_url: str, run_name: str) -> None:
    """No thread is left behind that waits for somebody's deadline."""
    from penstock.bus.connection import connect
    from penstock.config import BusConfig

    async def play() -> None:
        async with connect(BusConfig(url=nats_url, lease_ttl_s=1.0), run=run_name) as bus:
            async with simulated_replica(bus, join=Fault("hang")), publishing(bus) as publisher:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(publisher.publish(snapshot(1)), 1.0)
            await bus.jetstream.delete_key_value(f"{run_name}_replicas")

    started = time.monotonic()
    asyncio.run(play())
    assert time.monotonic() - started < 15  # the rendezvous has 30 s, and asyncio.run waits for all threads


async def test_an_address_that_is_not_this_machines_is_said_so(bus: Bus) -> None:
    """push.host is for a person to change."""
    async with replicas_of(bus, 1), publishing(bus, host="192.0.2.1") as publisher:
        with pytest.raises(SetupError, match=r"push\.host"):
            await publisher.publish(snapshot(1))


def test_a_snapshot_is_a_copy() -> None:
    """What the optimizer does in place afterwards changes nothing, be it one tensor to a bucket or several."""
    for max_bucket_bytes in (1, 1 << 20):
        weights = weights_of(1)
        taken = PublishedWeights.take(1, weights.items(), max_bucket_bytes=max_bucket_bytes)
        before = [bucket.clone() for bucket in taken.buckets]
        for tensor in weights.values():
            tensor.to(tensor.dtype).add_(1)
        assert all(torch.equal(bucket, copy) for bucket, copy in zip(taken.buckets, before, strict=True))
        assert taken.differing_names(digests(1)) == []
        assert taken.differing_names({**digests(1), "scale": 0, "other": 1}) == ["other", "scale"]
        assert sum(bucket.numel() for bucket in taken.buckets) == taken.manifest.num_bytes
        assert len(taken.digests) == len(SHAPES)


def test_tied_weights_are_sent_once(tiny_model_path: Path) -> None:
    """Each memory has one name in the manifest; one that had two is refused."""
    policy = load_policy(tiny_model_path, temperature=1.0, forbidden_ids=())
    named = dict(policy.named_weights())
    taken = PublishedWeights.take(1, named.items(), max_bucket_bytes=1 << 20)
    storages = {parameter.untyped_storage().data_ptr(): parameter for parameter in policy.model.parameters()}
    assert len(taken.manifest.tensors) == len(storages)
    assert taken.manifest.num_bytes == sum(one.numel() * one.element_size() for one in storages.values())
    assert policy.model.lm_head.weight is policy.model.model.language_model.embed_tokens.weight
    tied = {**named, "lm_head.weight": policy.model.lm_head.weight.detach()}
    with pytest.raises(ValueError, match=r"lm_head\.weight and .*embed_tokens\.weight are one tensor"):
        PublishedWeights.take(1, tied.items(), max_bucket_bytes=1 << 20)


async def test_replicas_read_a_snapshot(bus: Bus, tmp_path: Path) -> None:
    """With transport disk no group forms; the file is one that others can read, and of many two are kept."""
    async with replicas_of(bus, 2) as replicas, publishing(bus, snapshot_dir=tmp_path, transport="disk") as publisher:
        for version in (1, 2, 3):
            report = await publisher.publish(snapshot(version))
            assert (report.num_replicas, report.num_failed) == (2, 0)
            for replica in replicas:
                said = await replica.report()
                assert (said.version, said.digests, said.groups) == (version, digests(version), [])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000002", "v00000003"]
        folder = publisher.snapshots.folder_of(3)
        assert folder is not None
        read = load_file(folder / "model.safetensors")
        assert {name: tensor_digest(tensor) for name, tensor in read.items()} == digests(3)


async def test_a_late_joiner_reads_the_snapshot(bus: Bus, tmp_path: Path) -> None:
    """Without a group, and without a pause for those that have the version."""
    async with (
        publishing(bus, snapshot_dir=tmp_path) as publisher,
        kept_current(publisher),
        replicas_of(bus, 1) as (first,),
    ):
        await publisher.publish(snapshot(4))
        await until_file(publisher, 4)
        async with simulated_replica(bus, replica_id="engine-9") as second:
            await until_serving(second, 4)
            assert (await second.report()).groups == []
        assert (await first.report()).num_paused == 1


@pytest.mark.parametrize("harm", ["gone", "other version", "cut short", "one bit", "unwritable"])
async def test_a_snapshot_that_is_of_no_use_is_replaced_by_a_broadcast(bus: Bus, tmp_path: Path, harm: str) -> None:
    """Whatever is wrong with the file, the replica gets exactly the published weights in the same push."""
    folder = tmp_path / "snapshots"
    async with replicas_of(bus, 1) as (replica,), publishing(bus, snapshot_dir=folder, transport="disk") as publisher:
        if harm == "unwritable":
            folder.write_text("no folder")
        else:
            await publisher.snapshots.write(snapshot(2))
            path = folder / "v00000002" / "model.safetensors"
            data = bytearray(path.read_bytes())
            if harm == "gone":
                path.unlink()
            elif harm == "other version":
                await asyncio.to_thread(_write_other, folder)
            elif harm == "cut short":
                path.write_bytes(data[:-100])
            else:
                data[-1] ^= 1
                path.write_bytes(data)
        report = await publisher.publish(snapshot(2))
        assert (report.num_replicas, report.num_failed) == (1, 0)
        said = await replica.report()
        assert (said.version, len(said.groups)) == (2, 1)
        assert said.serving_digests == [digests(2)]


def _write_other(folder: Path) -> None:
    other = snapshot(9)
    written = write_snapshot(folder, 9, other.manifest, other.buckets)
    (written / "model.safetensors").replace(folder / "v00000002" / "model.safetensors")


async def until_file(publisher: WeightPublisher, version: int) -> None:
    async with asyncio.timeout(10):
        while publisher.snapshots.newest(version) is None:
            await asyncio.sleep(0.02)


async def test_a_replica_that_holds_the_version_before_reads_the_delta(bus: Bus, tmp_path: Path) -> None:
    """One that joins, or has missed a version, reads all of it."""
    settings: dict[str, Any] = {"snapshot_dir": tmp_path, "transport": "delta"}
    async with replicas_of(bus, 2) as (first, second), publishing(bus, **settings) as publisher:
        for version in (1, 2):
            assert (await publisher.publish(snapshot(version))).num_replicas == 2
        await second.set_faults(GetReplica=Fault("refuse"))
        for version in (3, 4):
            assert (await publisher.publish(snapshot(version))).num_replicas == 1
        async with kept_current(publisher):
            await until_serving(second, 4)
        async with simulated_replica(bus, replica_id="engine-9") as third:
            await until_seen(publisher, lambda values: "engine-9" in values)
            assert (await publisher.publish(snapshot(5))).num_replicas == 3
            full, delta = "snapshot", "delta"
            expected = ((first, [full, *[delta] * 4]), (second, [full, delta, full, delta]), (third, [full]))
            for replica, loads in expected:
                said = await replica.report()
                assert (said.loads, said.digests, said.groups) == (loads, digests(5), [])


@pytest.mark.parametrize("harm", ["gone", "damaged", "of other weights"])
async def test_a_delta_that_is_of_no_use_is_replaced(bus: Bus, tmp_path: Path, harm: str) -> None:
    """Weights that it made wrong serve nothing; what the replica gets in its place is exact."""
    settings: dict[str, Any] = {"snapshot_dir": tmp_path, "transport": "delta"}
    async with replicas_of(bus, 1) as (replica,), publishing(bus, **settings) as publisher:
        await publisher.publish(snapshot(1))
        await publisher.snapshots.write(snapshot(2))
        path = tmp_path / "v00000002" / "delta.safetensors"
        if harm == "gone":
            path.unlink()
        elif harm == "damaged":
            data = bytearray(path.read_bytes())
            data[-20] ^= 1
            path.write_bytes(data)
        else:
            other, now = snapshot(7), snapshot(2)
            write_delta(path.parent, now.manifest, other.buckets, now.buckets, base_version=1)
        async with kept_current(publisher):
            await publisher.publish(snapshot(2))
            await until_serving(replica, 2)
        assert (await replica.report()).serving_digests == [digests(1), digests(2)]
