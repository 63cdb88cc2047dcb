"""Weight files that members read from a folder with the same path as on the trainer.

If writing them fails, the weights are broadcast instead.
"""

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import structlog

from penstock.v1 import rollout_pb2
from penstock.weights.version_folders import claim
from penstock.weights.weight_files import write_weight_files
from services.trainer.config import WeightSyncConfig
from services.trainer.weight_sync.snapshot import WeightSnapshot
from services.trainer.weight_sync.transports.base import PullTransport

log = structlog.get_logger()


@dataclass(frozen=True)
class DiskTransport(PullTransport):
    """The weight files of one version."""

    name = "disk"
    folder: Path

    def name_source(self, request: rollout_pb2.PrepareWeightsRequest) -> None:
        """Name the folder."""
        request.disk.folder = str(self.folder)


@dataclass(slots=True)
class WeightFileStore:
    """Writes weight files below `parent`, one version at a time; with None it writes nothing."""

    parent: Path | None
    owner: Path | None = None
    """The run folder that is noted in `parent`; None: `parent` lies in it."""
    _newest: tuple[int, Path] | None = None
    _writing: asyncio.Task[None] | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def of_run(cls, config: WeightSyncConfig, run_folder: Path) -> Self:
        """Return the store of a run: below the configured folder, else in the run folder if the transport is disk."""
        if (shared := config.own_files_dir(run_folder)) is not None:
            return cls(shared, Path(os.path.abspath(run_folder)))
        return cls(run_folder.absolute() / "weights" if config.transport == "disk" else None)

    @classmethod
    def of(cls, version: int, folder: Path) -> Self:
        """Return a store of existing files, which writes none."""
        return cls(None, _newest=(version, folder))

    def folder_of(self, version: int) -> Path | None:
        """Return the folder of `version`, if it was the last version written."""
        return self._newest[1] if self._newest is not None and self._newest[0] == version else None

    async def write(self, weights: WeightSnapshot) -> None:
        """Write a version, unless it has already been written."""
        async with self._lock:
            if self.parent is None or self.folder_of(weights.version) is not None:
                return
            started = time.monotonic()
            try:
                folder = await asyncio.to_thread(self._write, self.parent, weights)
            except OSError as error:
                log.error(
                    "weight_files.failed",
                    folder=str(self.parent),
                    reason=str(error),
                    remedy="make room, or set trainer.weight_sync.files_dir",
                )
                return
            self._newest = (weights.version, folder)
        log.info("weight_files.written", version=weights.version, elapsed_s=round(time.monotonic() - started, 3))

    def _write(self, parent: Path, weights: WeightSnapshot) -> Path:
        if self.owner is not None:
            claim(parent, self.owner)
        return write_weight_files(parent, weights.version, weights.manifest, weights.buckets)

    def write_soon(self, weights: WeightSnapshot) -> None:
        """Write a version in the background, unless another is still being written."""
        if self.parent is not None and (self._writing is None or self._writing.done()):
            self._writing = asyncio.create_task(self.write(weights))

    async def close(self) -> None:
        """Wait until the current write has finished. The files stay: replicas may live on, and read them."""
        if self._writing is not None:
            await self._writing
