"""The trainer's publisher, for pushes to real engines."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.bus.buckets.watch import Watch
from penstock.runtime.security import Security
from services.trainer.config import WeightSyncConfig
from services.trainer.weight_sync.publisher import WeightPublisher
from services.trainer.weight_sync.transports.disk import WeightFileStore


@asynccontextmanager
async def engine_publisher(
    watch: Watch, *, files_dir: Path | None = None, **settings: Any
) -> AsyncIterator[WeightPublisher]:
    """It pushes over gloo, in several buckets although the weights are small.

    Args:
        watch: The leases of the replicas.
        files_dir: Where each version is written as weight files; None: nowhere.
        settings: Those of `trainer.weight_sync`.
    """
    publisher = WeightPublisher(
        config=WeightSyncConfig.model_validate(settings),
        host="127.0.0.1",
        replicas=watch,
        backend="gloo",
        files=WeightFileStore(files_dir),
        security=Security(),
        max_bucket_bytes=1 << 16,
    )
    try:
        yield publisher
    finally:
        await publisher.close()
