"""Pushes of adapters alone: over every transport replicas merge them into the same base, exactly, or do not serve."""

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from penstock.bus.connection import Bus
from penstock.v1 import common_pb2
from penstock.weights.adapters import change_of, merged
from penstock.weights.digest import XXH3, tensor_digest
from penstock.weights.named_weights import NamedWeights
from services.rollout.testing.memory_sink import Action, Fault
from services.rollout.testing.simulated_replica import SHAPES, SimulatedReplica, simulated_replica, weights_of
from services.trainer.weight_sync.publisher import WeightPublisher
from tests.integration.publisher.test_held_out import hold_out_of, until_known
from tests.support.waiting import promptly, until
from tests.support.weights.publishing import kept_current, lose, publishing, replicas_of, snapshot

pytestmark = pytest.mark.usefixtures("replica_forkserver", "rendezvous")

Tensors = dict[str, torch.Tensor]
START: Tensors = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in SHAPES.items()}
"""What simulated replicas begin with."""


def adapters_of(version: int, layers: tuple[str, ...] = ("embed", "head")) -> Tensors:
    """Those of a version: A and B for some matrices."""
    generator = torch.Generator().manual_seed(version)
    found = {}
    for layer in layers:
        rows, columns = SHAPES[f"{layer}.weight"][1]
        found[f"{layer}.lora_A.weight"] = torch.randn(4, columns, generator=generator)
        found[f"{layer}.lora_B.weight"] = torch.randn(rows, 4, generator=generator)
    return found


def merged_digests(base: Tensors, pushed: Tensors) -> dict[str, int]:
    """What a replica holds that merged a push."""
    held = dict(base)
    for name in pushed:
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            change = change_of(pushed[name], pushed[f"{layer}.lora_B.weight"])
            held[f"{layer}.weight"] = merged(base[f"{layer}.weight"], change)
    return {name: tensor_digest(tensor, XXH3) for name, tensor in held.items()}


def weights(pushed: Tensors, base: Tensors = START) -> NamedWeights:
    """As a trainer gives them, with the digests of its base."""
    named = NamedWeights.of(pushed)
    return NamedWeights(
        specs=named.specs,
        device=named.device,
        tensors=named.tensors,
        base_digests={name: tensor_digest(tensor, XXH3) for name, tensor in base.items()},
    )


async def until_ready(replica: SimulatedReplica, version: int) -> None:
    """It serves the version."""

    async def is_serving() -> bool:
        report = await replica.report()
        return (report.version, report.state) == (version, common_pb2.REPLICA_STATE_READY)

    await until(is_serving)


async def publish(publisher: WeightPublisher, version: int, pushed: Tensors, base: Tensors = START) -> tuple[int, int]:
    """Push it; how many replicas took it, and how many did not."""
    report = await publisher.publish(publisher.take(version, weights(pushed, base)))
    assert report.num_bytes == sum(tensor.nbytes for tensor in pushed.values())
    return report.num_replicas, report.num_failed


@pytest.mark.parametrize("transport", ["broadcast", "disk", "shared_memory", "delta"])
async def test_replicas_merge_what_is_pushed(bus: Bus, transport: str, tmp_path: Path) -> None:
    """Each version replaces the one before, and a replica that joins late gets the newest."""
    async with (
        replicas_of(bus, 2) as replicas,
        publishing(bus, transport=transport, files_dir=tmp_path if transport == "disk" else None) as publisher,
        kept_current(publisher),
    ):
        for version in (1, 2, 3):
            assert await publish(publisher, version, adapters_of(version)) == (2, 0)
        async with simulated_replica(bus, replica_id="engine-9") as late:
            await until_ready(late, 3)
            assert (await late.report()).serving_digests == [merged_digests(START, adapters_of(3))]
        for replica in replicas:
            said = await replica.report()
            assert said.serving_digests == [merged_digests(START, adapters_of(version)) for version in (1, 2, 3)]
            loads = ["whole", "delta", "delta"] if transport == "delta" else [transport] * 3
            assert said.loads == loads


@pytest.mark.parametrize(("point", "action"), [("bucket", "corrupt"), ("bucket", "refuse"), ("verify", "refuse")])
async def test_a_push_that_fails_half_way_is_healed_by_the_next(bus: Bus, point: str, action: Action) -> None:
    """No token is served by damaged adapters, or by a matrix into which an earlier push was merged."""
    async with replicas_of(bus, 1) as (replica,), publishing(bus, max_bucket_bytes=4096) as publisher:
        await publish(publisher, 1, adapters_of(1))
        await replica.set_faults(**{point: Fault(action)})
        async with kept_current(publisher):
            await publish(publisher, 2, adapters_of(2))
            await until_ready(replica, 2)
        said = await replica.report()
        assert said.serving_digests == [merged_digests(START, adapters_of(version)) for version in (1, 2)]


async def test_a_replica_with_another_base_does_not_serve(bus: Bus) -> None:
    """The digests show it, and the error says what must be the same."""
    other = {**START, "norm.weight": torch.ones_like(START["norm.weight"])}
    async with replicas_of(bus, 1) as (replica,), publishing(bus) as publisher:
        with capture_logs() as events:
            assert await publish(publisher, 1, adapters_of(1), other) == (0, 1)
        assert (await replica.report()).num_resumed == 0
        [failed] = [event for event in events if event["event"] == "replica.quarantined"]
        assert "1 parameters: ['norm.weight']; only adapters are pushed" in failed["reason"]
        assert "set rollout.dtype and trainer.dtype alike, and start it again" in failed["reason"]


async def test_whole_weights_are_a_new_base(bus: Bus) -> None:
    """Adapters, whole weights, then adapters of another layer over these: nothing of the first is left."""
    async with replicas_of(bus, 1) as (replica,), publishing(bus) as publisher:
        await publish(publisher, 1, adapters_of(1))
        await publisher.publish(snapshot(2))
        pushed = adapters_of(3, ("head",))
        assert await publish(publisher, 3, pushed, weights_of(2)) == (1, 0)
        said = await replica.report()
        assert said.serving_digests[-1] == merged_digests(weights_of(2), pushed)


async def test_a_replica_is_held_out_at_a_version_of_adapters(bus: Bus, tmp_path: Path) -> None:
    """One that takes the place of one that died has newer adapters, and merges the older ones into the same base."""
    async with (
        replicas_of(bus, 3) as (first, second, _),
        publishing(bus, transport="shared_memory") as publisher,
        kept_current(publisher),
    ):
        taken = publisher.take(1, weights(adapters_of(1)))
        await publisher.publish(taken)
        await until_known(publisher, 1)
        assert await promptly(publisher.hold_out(await hold_out_of(bus, tmp_path, taken)))
        assert await publish(publisher, 2, adapters_of(2)) == (2, 0)
        await lose(bus, first)
        await until_ready(second, 1)
        await publisher.release_held_out()
        await until_ready(second, 2)
        served = (await second.report()).serving_digests
        assert served == [merged_digests(START, adapters_of(version)) for version in (1, 2, 1, 2)]
