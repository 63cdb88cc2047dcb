"""A publisher with simulated replicas around it, for tests of pushes."""

import asyncio
import contextlib
import dataclasses
import math
import unittest.mock
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from penstock.bus.buckets.watch import Watch, watched
from penstock.bus.connection import Bus
from penstock.runtime.security import Security
from penstock.v1 import common_pb2
from penstock.weights.digest import XXH3, tensor_digest
from penstock.weights.named_weights import NamedWeights
from penstock.weights.shared_memory import SharedMemoryPool
from services.rollout.testing.simulated_replica import SimulatedReplica, simulated_replica, weights_of
from services.trainer.config import WeightSyncConfig
from services.trainer.weight_sync.failed_replicas import FailedReplicas
from services.trainer.weight_sync.publisher import WeightPublisher
from services.trainer.weight_sync.snapshot import WeightSnapshot
from services.trainer.weight_sync.transports.disk import WeightFileStore
from tests.support.waiting import HANG_S, promptly, until

NEVER_S = 70.0
"""Longer than `HANG_S`: what waits for it fails its test. A push adds up eight; an engine allows 600 s in all."""
_FIXED_DEADLINES = ("deadlines.CONTROL_S", "rolling_push.CANCEL_NOTICE_S", "collective_push.CANCEL_NOTICE_S")
_CONFIG = WeightSyncConfig(transport="broadcast", stage_timeout_s=NEVER_S, transfer_timeout_s=NEVER_S)
_MAX_BUCKET_BYTES = 8192
"""Several buckets in each push, although the weights are small."""


def snapshot(version: int, *, shared: bool = False) -> WeightSnapshot:
    """The weights of a version, taken."""
    return WeightSnapshot.take(
        version,
        NamedWeights.of(weights_of(version)),
        max_bucket_bytes=_MAX_BUCKET_BYTES,
        pool=SharedMemoryPool() if shared else None,
    )


def digests(version: int) -> dict[str, int]:
    """What a replica of the version holds."""
    return {name: tensor_digest(tensor, XXH3) for name, tensor in weights_of(version).items()}


@asynccontextmanager
async def watching(bus: Bus) -> AsyncIterator[Watch]:
    """The replicas' leases."""
    ttl_s = bus.config.lease_ttl_s
    async with watched(await bus.bucket("replicas", ttl_s=ttl_s), ttl_s=ttl_s) as watch:
        yield watch


@asynccontextmanager
async def publishing(
    bus: Bus,
    *,
    host: str = "127.0.0.1",
    files_dir: Path | None = None,
    retry_after_s: float = 0.5,
    max_bucket_bytes: int = _MAX_BUCKET_BYTES,
    **settings: Any,
) -> AsyncIterator[WeightPublisher]:
    """A publisher whose replicas' leases are as they are now; deadlines that `settings` do not name never pass."""
    async with watching(bus) as watch, contextlib.AsyncExitStack() as patched:
        for name in _FIXED_DEADLINES:
            patched.enter_context(unittest.mock.patch(f"services.trainer.weight_sync.{name}", NEVER_S))
        publisher = WeightPublisher(
            config=_CONFIG.model_copy(update=settings),
            host=host,
            replicas=watch,
            backend="gloo",
            files=WeightFileStore(files_dir),
            security=Security(),
            failed_replicas=FailedReplicas(retry_after_s),
            max_bucket_bytes=max_bucket_bytes,
        )
        try:
            yield publisher
        finally:
            await promptly(publisher.close())


@contextmanager
def deadlines(publisher: WeightPublisher, **seconds: float) -> Iterator[None]:
    """Pushes that begin during the context have these deadlines (`PushDeadlines`); the others are as before."""
    before = publisher._deadlines
    publisher._deadlines = dataclasses.replace(before, **seconds)
    try:
        yield
    finally:
        publisher._deadlines = before


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


async def lose(bus: Bus, replica: SimulatedReplica) -> None:
    """kill -9, and the end of its lease, which lapses much later."""
    replica.kill()
    await (await bus.bucket("replicas", ttl_s=bus.config.lease_ttl_s)).delete(replica.replica_id)


async def assert_serving(replica: SimulatedReplica, version: int) -> None:
    """READY at the version, with its bytes."""
    report = await replica.report()
    assert (report.version, report.state) == (version, common_pb2.REPLICA_STATE_READY)
    assert report.digests == digests(version)


async def until_serving(replica: SimulatedReplica, version: int) -> None:
    """Wait until it serves the version."""

    async def is_serving() -> bool:
        report = await replica.report()
        return (report.version, report.state) == (version, common_pb2.REPLICA_STATE_READY)

    await until(is_serving)
    await assert_serving(replica, version)


async def until_healed(publisher: WeightPublisher) -> None:
    """The publisher knows of no replica whose last push failed."""
    await until(lambda: not publisher.failed_replicas.due(now=math.inf))


async def steps_of(replica: SimulatedReplica, point: str) -> int:
    """How often a push has come to that point."""
    said = await replica.report()
    return len(said.groups) if point == "join" else said.calls.count(point)


async def until_reached(replica: SimulatedReplica, point: str, seen: int) -> None:
    """A push comes to that point, once more than `seen`."""

    async def is_reached() -> bool:
        return await steps_of(replica, point) > seen

    await until(is_reached)


async def until_seen(publisher: WeightPublisher, condition: Callable[[dict[str, bytes]], bool]) -> None:
    """The publisher has heard of leases of which `condition` holds."""
    async with asyncio.timeout(HANG_S):
        while not condition(publisher.replicas.values):
            await publisher.replicas.changed(0.1)


class FixedWatch:
    """A watch that has stopped to hear."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values
        self.num_changes = 0

    async def changed(self, timeout_s: float, *, since: int | None = None) -> bool:
        await asyncio.sleep(timeout_s)  # all that a caller gives it
        return False
