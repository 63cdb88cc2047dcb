"""The published versions as files.

A snapshot is a convenience: where it cannot be written or read, weights travel another way.
"""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from penstock.weights.snapshot import snapshot_folder, write_snapshot
from services.trainer.push.published_weights import PublishedWeights

log = structlog.get_logger()


@dataclass(slots=True)
class Snapshots:
    """Writes into `parent`, one at a time; None: writes nothing."""

    parent: Path | None
    _newest: tuple[int, Path] | None = None
    _writing: asyncio.Task[None] | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def folder_of(self, version: int) -> Path | None:
        """Where the snapshot of a version is, or soon will be."""
        return None if self.parent is None else snapshot_folder(self.parent, version)

    def newest(self, version: int) -> Path | None:
        """The snapshot of `version`, if it is written."""
        return self._newest[1] if self._newest is not None and self._newest[0] == version else None

    async def write(self, weights: PublishedWeights) -> None:
        """Write a version, unless it is there already."""
        async with self._lock:
            if self.parent is None or self.newest(weights.version) is not None:
                return
            started = time.monotonic()
            try:
                folder = await asyncio.to_thread(
                    write_snapshot, self.parent, weights.version, weights.manifest, weights.buckets
                )
            except OSError as error:
                log.error("snapshot.failed", folder=str(self.parent), reason=str(error), remedy="push.snapshot_dir")
                return
            self._newest = (weights.version, folder)
        log.info("snapshot.written", version=weights.version, elapsed_s=round(time.monotonic() - started, 3))

    def write_soon(self, weights: PublishedWeights) -> None:
        """Write a version in the background, unless another is being written."""
        if self.parent is not None and (self._writing is None or self._writing.done()):
            self._writing = asyncio.create_task(self.write(weights))

    async def close(self) -> None:
        """Finish what is being written."""
        if self._writing is not None:
            await self._writing
