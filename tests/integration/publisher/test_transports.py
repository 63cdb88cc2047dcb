"""Transports: each delivers exactly the trainer's bytes, and a replica that cannot use one gets a fallback."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs

from penstock.bus.connection import Bus
from penstock.weights.delta import write_blocks
from penstock.weights.digest import tensor_digest
from penstock.weights.manifest import Manifest
from penstock.weights.named_weights import NamedWeights
from penstock.weights.weight_files import write_weight_files
from services.rollout.testing.memory_sink import Action, Fault
from services.rollout.testing.simulated_replica import simulated_replica, weights_of
from services.trainer.weight_sync.publisher import WeightPublisher
from services.trainer.weight_sync.transports import delta
from tests.support.waiting import until
from tests.support.weights.publishing import (
    assert_serving,
    deadlines,
    digests,
    kept_current,
    publishing,
    replicas_of,
    snapshot,
    until_healed,
    until_seen,
    until_serving,
)

pytestmark = pytest.mark.usefixtures("replica_forkserver", "rendezvous")

DEADLINE_S = 3.0
"""Of the stage at which a test makes a replica hang."""
STAGES = {
    "prepare": "prepare_s",
    "pause": "pause_s",
    "commit": "commit_s",
    "bucket": "transfer_s",
}
"""Whose deadline ends a hang at that point."""


async def test_replicas_read_weight_files(bus: Bus, tmp_path: Path) -> None:
    """With transport disk no process group forms; the files are plain safetensors, and the newest two are kept."""
    async with replicas_of(bus, 2) as replicas, publishing(bus, files_dir=tmp_path, transport="disk") as publisher:
        for version in (1, 2, 3):
            report = await publisher.publish(snapshot(version))
            assert (report.num_replicas, report.num_failed) == (2, 0)
            for replica in replicas:
                said = await replica.report()
                assert (said.version, said.digests, said.groups) == (version, digests(version), [])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000002", "v00000003"]
        folder = publisher.files.folder_of(3)
        assert folder is not None
        read = load_file(folder / "model.safetensors")
        assert {name: tensor_digest(tensor) for name, tensor in read.items()} == digests(3)


async def test_a_late_joiner_reads_weight_files(bus: Bus, tmp_path: Path) -> None:
    """Without a process group, and without a pause for replicas that have the version."""
    async with (
        publishing(bus, files_dir=tmp_path) as publisher,
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
async def test_unusable_weight_files_are_replaced_by_a_broadcast(bus: Bus, tmp_path: Path, harm: str) -> None:
    """Whatever is wrong with the files, the replica gets exactly the published weights in the same publication."""
    folder = tmp_path / "weights"
    async with replicas_of(bus, 1) as (replica,), publishing(bus, files_dir=folder, transport="disk") as publisher:
        if harm == "unwritable":
            folder.write_text("no folder")
        else:
            await publisher.files.write(snapshot(2))
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
    written = write_weight_files(folder, 9, other.manifest, other.buckets)
    (written / "model.safetensors").replace(folder / "v00000002" / "model.safetensors")


async def until_file(publisher: WeightPublisher, version: int) -> None:
    await until(lambda: publisher.files.folder_of(version) is not None)


async def test_a_replica_that_holds_the_version_before_gets_the_delta(bus: Bus) -> None:
    """A replica that joins or has missed a version gets all weights, over the same transport."""
    async with replicas_of(bus, 2) as (first, second), publishing(bus, transport="delta") as publisher:
        for version in (1, 2):
            assert (await publisher.publish(snapshot(version))).num_replicas == 2
        await second.set_faults(GetReplica=Fault("refuse"))
        for version in (3, 4):
            assert (await publisher.publish(snapshot(version))).num_replicas == 1
        async with kept_current(publisher):
            await until_serving(second, 4)
            await until_healed(publisher)
        async with simulated_replica(bus, replica_id="engine-9") as third:
            await until_seen(publisher, lambda values: "engine-9" in values)
            assert (await publisher.publish(snapshot(5))).num_replicas == 3
            expected = (
                (first, ["whole", *["delta"] * 4]),
                (second, ["whole", "delta", "whole", "delta"]),
                (third, ["whole"]),
            )
            for replica, loads in expected:
                said = await replica.report()
                assert (said.loads, said.digests, said.groups) == (loads, digests(5), [])


@pytest.mark.parametrize("harm", ["damaged", "of other weights"])
async def test_an_unusable_delta_is_replaced(bus: Bus, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    """Wrong weights never serve a token, and the replica then gets all weights."""

    def harmed(
        file: BinaryIO, manifest: Manifest, new: Sequence[torch.Tensor], *, old: Sequence[torch.Tensor] | None
    ) -> int:
        if old is None:
            return write_blocks(file, manifest, new, old=None)
        base = snapshot(7).buckets if harm == "of other weights" else old
        size_bytes = write_blocks(file, manifest, new, old=base)
        if harm == "damaged":
            file.seek(-20, 2)
            file.write(b"!")
        return size_bytes

    monkeypatch.setattr(delta, "write_blocks", harmed)
    async with replicas_of(bus, 1) as (replica,), publishing(bus, transport="delta") as publisher:
        await publisher.publish(snapshot(1))
        async with kept_current(publisher):
            await publisher.publish(snapshot(2))
            await until_serving(replica, 2)
        said = await replica.report()
        assert said.serving_digests == [digests(1), digests(2)]
        assert said.loads == ["whole", "delta", "whole"]


@pytest.mark.parametrize("action", ["die", "hang", "refuse"])
async def test_a_replica_that_fails_its_upload_costs_the_others_nothing(bus: Bus, action: Action) -> None:
    """They have not paused for it; it had not either, and is brought there when it is well."""
    hung = {"upload_s": 2 * DEADLINE_S} if action == "hang" else {}  # the other one must keep it
    async with (
        replicas_of(bus, 1) as (first,),
        simulated_replica(bus, replica_id="engine-0-odd", upload=Fault(action)) as second,
        publishing(bus, transport="delta") as publisher,
    ):
        with deadlines(publisher, **hung):
            report = await publisher.publish(snapshot(1))
        assert (report.num_replicas, report.num_failed) == (1, 1)
        said = await first.report()
        assert (said.version, said.num_paused) == (1, 1)
        if action != "die":
            async with kept_current(publisher):
                await until_serving(second, 1)
            assert (await second.report()).num_paused == 1


@pytest.mark.parametrize("transport", ["auto", "shared_memory"])
async def test_replicas_on_this_machine_copy_from_memory(bus: Bus, transport: str) -> None:
    """No process group forms; a snapshot reuses the memory of an old one, never that of the published one."""
    versions, names = (1, 2, 3, 4), []
    async with replicas_of(bus, 2) as replicas, publishing(bus, transport=transport) as publisher:
        for version in versions:
            weights = publisher.take(version, NamedWeights.of(weights_of(version)))
            assert weights.shared_memory is not None
            names.append(weights.shared_memory.message.host.name)
            report = await publisher.publish(weights)
            assert (report.num_replicas, report.num_failed) == (2, 0)
        assert len(set(names)) < len(versions)
        del weights
        next_weights = publisher.take(5, NamedWeights.of(weights_of(5)))
        async with simulated_replica(bus, replica_id="engine-9") as third, kept_current(publisher):
            await until_serving(third, 4)
            assert (await third.report()).loads == ["shared_memory"]
        assert (await publisher.publish(next_weights)).num_replicas == 2
        for replica in replicas:
            said = await replica.report()
            assert (said.digests, said.loads, said.groups) == (digests(5), ["shared_memory"] * 5, [])
            assert said.serving_digests == [digests(version) for version in (*versions, 5)]


@pytest.mark.parametrize("transport", ["auto", "shared_memory"])
async def test_a_replica_on_another_machine_is_broadcast_to(bus: Bus, transport: str) -> None:
    """In the same publication, logged once; the others keep copying."""
    async with (
        replicas_of(bus, 1) as (near,),
        simulated_replica(bus, replica_id="engine-9", elsewhere=True) as far,
        publishing(bus, transport=transport) as publisher,
    ):
        with capture_logs() as events:
            for version in (1, 2):
                report = await publisher.publish(snapshot(version, shared=True))
                assert (report.num_replicas, report.num_failed) == (2, 0)
        falls = [event for event in events if event["event"] == "push.fell_back"]
        assert [(event["replica_id"], event["transport"]) for event in falls] == [("engine-9", "shared_memory")]
        assert "another machine" in falls[0]["reason"]
        for replica, loads in ((near, ["shared_memory"] * 2), (far, ["broadcast"] * 2)):
            said = await replica.report()
            assert (said.digests, said.loads) == (digests(2), loads)


@pytest.mark.parametrize("point", ["prepare", "receive", "bucket", "verify"])
async def test_a_replica_that_is_killed_while_it_copies(bus: Bus, point: str) -> None:
    """The others are not delayed."""
    async with (
        replicas_of(bus, 1) as (first,),
        simulated_replica(bus, replica_id="engine-0-dying", **{point: Fault("die")}),
        publishing(bus, transport="shared_memory") as publisher,
    ):
        report = await publisher.publish(snapshot(1, shared=True))
        assert (report.num_replicas, report.num_failed) == (1, 1)
        await assert_serving(first, 1)


@pytest.mark.parametrize(
    ("point", "action", "transport"),
    [
        pytest.param("prepare", "hang", "shared_memory", marks=pytest.mark.slow),
        pytest.param("pause", "hang", "shared_memory", marks=pytest.mark.slow),
        ("pause", "refuse", "shared_memory"),
        ("commit", "refuse", "shared_memory"),
        pytest.param("commit", "hang", "shared_memory", marks=pytest.mark.slow),
        pytest.param("prepare", "refuse", "broadcast", marks=pytest.mark.slow),
        ("receive", "refuse", "broadcast"),
        ("bucket", "hang", "broadcast"),
        ("verify", "corrupt", "broadcast"),
    ],
)
async def test_a_transport_is_given_up_only_for_its_own_failures(
    bus: Bus, point: str, action: Action, transport: str
) -> None:
    """A replica that is slow to pause or commit copies from memory again; one that cannot copy gets a broadcast."""
    hung = {STAGES[point]: DEADLINE_S} if action == "hang" else {}
    async with replicas_of(bus, 1) as (replica,), publishing(bus, transport="shared_memory") as publisher:
        await replica.set_faults(**{point: Fault(action)})
        with deadlines(publisher, **hung), capture_logs() as events:
            await publisher.publish(snapshot(1, shared=True))
        if hung and point != "prepare":  # whose call has the deadline itself
            [failure] = [event for event in events if event["event"] == "push.replica_failed"]
            assert f"{replica.replica_id}: stage {STAGES[point][:-2]} exceeded its deadline; see" in failure["reason"]
        async with kept_current(publisher):
            await until_serving(replica, 1)
            assert (await publisher.publish(snapshot(2, shared=True))).num_failed == 0
            await until_serving(replica, 2)
        said = await replica.report()
        assert said.loads[-1] == transport
