"""Engines of one process and of two beside each other, of a family whose layers attend linearly: whichever way a push
takes, what it makes of both is the trainer's model. Not collected by default: `make test-families`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import torch

from penstock.bus.buckets.watch import Watch, watched
from penstock.bus.connection import connect
from penstock.config import BusConfig
from penstock.v1 import common_pb2
from penstock.weights.named_weights import NamedWeights
from services.rollout.testing.engine_process import EngineProcess, engine_process, log_events
from services.trainer.config import WeightSyncConfig
from services.trainer.weight_sync.publisher import WeightPublisher
from services.trainer.weight_sync.transports.disk import WeightFileStore
from tests.support.engine.family import FELT, MOST, difference
from tests.support.engine.push import Push
from tests.support.engine.reference import Reference, until_replica
from tests.support.trainer.families import heard_in_engines, write_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.usefixtures("rendezvous")]

SECTIONS = (32, 32, 64)
"""Channels of queries, of keys and of values; each process has half of each."""
WAYS = ("broadcast", "shared_memory", "delta", "delta")
"""How a push reaches engines that are there."""


def exchanged(weight: torch.Tensor, *sizes: int) -> torch.Tensor:
    """What two processes hold of each section, the one's in place of the other's."""
    sections = weight.split(sizes or [len(weight)])
    return torch.cat([section.roll(len(section) // 2, 0) for section in sections])


FAULTS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "a convolution in other sections": ("conv1d.weight", lambda weight: weight.roll(32, dims=0)),
    "halves of a convolution as one section": ("conv1d.weight", exchanged),
    "the other process's convolution": ("conv1d.weight", lambda weight: exchanged(weight, *SECTIONS)),
    "the other process's heads": ("in_proj_qkv.weight", lambda weight: exchanged(weight, *SECTIONS)),
    "the other process's gates": ("in_proj_z.weight", exchanged),
    "the other process's share of tokens": ("in_proj_b.weight", exchanged),
    "the other process's decays": ("A_log", exchanged),
    "the other process's outputs": ("out_proj.weight", lambda weight: exchanged(weight.T).T.contiguous()),
}
"""Each in one parameter of one layer: exchanged in all of them, processes would still compute the same."""


async def require_same(engines: Sequence[EngineProcess], policy: Reference, version: int) -> None:
    """All engines have the policy as this version."""
    for engine in engines:
        await until_replica(
            engine,
            lambda replica: (replica.policy_version, replica.state) == (version, common_pb2.REPLICA_STATE_READY),
            timeout_s=60,
        )
        assert await difference(engine, policy) <= MOST


@asynccontextmanager
async def engines_that_join(model: Path, nats_url: str, folder: Path) -> AsyncIterator[list[EngineProcess]]:
    """One of a single process, one of two."""
    async with AsyncExitStack() as stack:
        engines = []
        for num_ranks in (1, 2):
            own = folder / f"of-{num_ranks}"
            own.mkdir()
            settings = {"max_running": 8, "context_length": 512, "tensor_parallel": num_ranks}
            process = engine_process(model, nats_url, own, run=folder.name, grace_s=1.0, lease_ttl_s=30.0, **settings)
            engines.append(await stack.enter_async_context(process))
        yield engines


@pytest.mark.leaves_behind("transformers' progress bar keeps a thread", "thread")
async def test_engines_of_one_process_and_of_two_take_each_push(nats_url: str, tmp_path: Path) -> None:
    """Published before they were there, and in every way since. Parts that are exchanged would be noticed."""
    model = write_model(heard_in_engines("qwen3_5"), tmp_path / "qwen3_5")
    policies = [Reference(model)]
    policies += [policies[0].perturbed(seed) for seed in range(1, 2 + len(WAYS))]
    async with contextlib.AsyncExitStack() as stack:
        config = BusConfig(url=nats_url, lease_ttl_s=30.0)  # it does not lapse while the machine is busy
        bus = await stack.enter_async_context(connect(config, run=tmp_path.name))
        bucket = await bus.bucket("replicas", ttl_s=config.lease_ttl_s)
        watch = await stack.enter_async_context(watched(bucket, ttl_s=config.lease_ttl_s))

        def publishing(transport: str, *, files_dir: Path | None = None) -> WeightPublisher:
            return publisher_of(stack, watch, transport, files_dir)

        first = publishing("broadcast", files_dir=tmp_path / "weights")
        await first.publish(first.take(1, NamedWeights.of(policies[1].weights)))
        keeping = asyncio.create_task(first.keep_current())
        engines = await stack.enter_async_context(engines_that_join(model, nats_url, tmp_path))
        try:
            await require_same(engines, policies[1], 1)
        finally:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
        publishers = {way: publishing(way) for way in WAYS}
        for version, way in enumerate(WAYS, start=2):
            weights = NamedWeights.of(policies[version].weights)
            report = await publishers[way].publish(publishers[way].take(version, weights))
            assert (report.num_replicas, report.num_failed) == (2, 0)
            await require_same(engines, policies[version], version)
        for engine in engines:
            received = [event["transport"] for event in log_events(engine.log) if event["event"] == "weights.received"]
            assert received == ["disk", *WAYS]
        newest, version = policies[-1], len(WAYS) + 1
        for number, (what, (name, fault)) in enumerate(FAULTS.items(), start=1):
            pushed = newest.weights
            [full] = [each for each in pushed if each.endswith(f"layers.1.linear_attn.{name}")]
            pushed[full] = fault(pushed[full])
            await Push(engines[1], pushed, version + number).complete()
            assert await difference(engines[1], newest) > FELT, what


def publisher_of(stack: AsyncExitStack, watch: Watch, transport: str, files_dir: Path | None) -> WeightPublisher:
    """A trainer's publisher, which the stack closes."""
    publisher = WeightPublisher(
        config=WeightSyncConfig(mode="retract", transport=transport),
        host="127.0.0.1",
        replicas=watch,
        backend="gloo",
        files=WeightFileStore(files_dir),
        max_bucket_bytes=1 << 16,
    )
    stack.push_async_callback(publisher.close)
    return publisher
