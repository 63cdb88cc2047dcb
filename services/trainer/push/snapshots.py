"""The published versions as files, and which replicas can read them.

A snapshot is a convenience: where it cannot be written or read, weights are broadcast.
"""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from penstock.errors import PenstockError
from penstock.weights.delta import write_delta
from penstock.weights.snapshot import snapshot_folder, write_snapshot
from services.trainer.push.published_weights import PublishedWeights
from services.trainer.push.stages import Member

log = structlog.get_logger()


@dataclass(slots=True)
class Snapshots:
    """Writes into `parent`, one at a time; None: writes nothing."""

    parent: Path | None
    with_deltas: bool = False
    """Write beside each version what has changed since the one before."""
    _base: PublishedWeights | None = None
    _delta: tuple[int, int] | None = None
    """Version and the version before, of the newest delta."""
    _newest: tuple[int, Path] | None = None
    _not_by: set[Member] = field(default_factory=set)
    _writing: asyncio.Task[None] | None = None

    def folder_of(self, version: int) -> Path | None:
        """Where the snapshot of a version is, or soon will be."""
        return None if self.parent is None else snapshot_folder(self.parent, version)

    def newest(self, version: int) -> Path | None:
        """The snapshot of `version`, if it is written."""
        return self._newest[1] if self._newest is not None and self._newest[0] == version else None

    def base_of(self, version: int) -> int | None:
        """The version against which there is a delta to `version`."""
        return self._delta[1] if self._delta is not None and self._delta[0] == version else None

    def readers(self, members: tuple[Member, ...]) -> tuple[Member, ...]:
        """Those that are not known to be unable to read snapshots."""
        return tuple(member for member in members if member not in self._not_by)

    def note_failure(self, member: Member, error: PenstockError) -> None:
        """Offer no more snapshots to `member`."""
        log.info("snapshot.not_loaded", replica_id=member.replica_id, reason=str(error))
        self._not_by.add(member)

    def forget_the_dead(self, live: set[Member]) -> None:
        """Keep in mind only what is known of the living."""
        self._not_by &= live

    async def write(self, weights: PublishedWeights) -> None:
        """Write a version, unless it is there already."""
        if self.parent is None or self.newest(weights.version) is not None:
            return
        started = time.monotonic()
        try:
            folder = await asyncio.to_thread(
                write_snapshot, self.parent, weights.version, weights.manifest, weights.buckets
            )
            if self.with_deltas:
                await self._write_delta(folder, weights)
        except OSError as error:
            log.error("snapshot.failed", folder=str(self.parent), reason=str(error), remedy="push.snapshot_dir")
            return
        self._newest = (weights.version, folder)
        log.info("snapshot.written", version=weights.version, elapsed_s=round(time.monotonic() - started, 3))

    async def _write_delta(self, folder: Path, weights: PublishedWeights) -> None:
        base, self._base = self._base, weights
        if base is None or base.manifest != weights.manifest or base.version < 1:
            return
        num_bytes = await asyncio.to_thread(
            lambda: write_delta(folder, weights.manifest, base.buckets, weights.buckets, base_version=base.version)
        )
        self._delta = (weights.version, base.version)
        log.info("delta.written", version=weights.version, num_bytes=num_bytes, num_full=weights.manifest.num_bytes)

    def write_soon(self, weights: PublishedWeights) -> None:
        """Write a version in the background, unless another is being written."""
        if self.parent is not None and (self._writing is None or self._writing.done()):
            self._writing = asyncio.create_task(self.write(weights))

    async def close(self) -> None:
        """Finish what is being written."""
        if self._writing is not None:
            await self._writing
