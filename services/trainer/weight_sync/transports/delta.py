"""Compressed blocks over gRPC: the changes since the previous version, or all weights.

Blocks are kept in unnamed files. The previous version, which a delta is computed against, stays in memory.
"""

import asyncio
import os
import tempfile
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import BinaryIO

import structlog

from penstock.errors import SetupError
from penstock.v1 import rollout_pb2
from penstock.weights.delta import write_blocks
from services.trainer.weight_sync.push_calls import Stub
from services.trainer.weight_sync.snapshot import WeightSnapshot
from services.trainer.weight_sync.transports.base import UploadTransport

log = structlog.get_logger()

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class DeltaTransport(UploadTransport):
    """A file of blocks, uploaded to each member before it pauses."""

    name = "delta"
    file: BinaryIO
    """The file, read by offset, so that several members can be served at a time."""
    size_bytes: int
    base_version: int
    """The version that the members must hold; 0: the blocks contain all weights."""

    def name_source(self, request: rollout_pb2.PrepareWeightsRequest) -> None:
        """Name the base version, and the size of the upload."""
        request.delta.base_version = self.base_version
        request.delta.size_bytes = self.size_bytes

    async def upload(self, stub: Stub, push_id: str, *, timeout_s: float) -> None:
        """Send all blocks."""
        await stub.SendWeights(self._chunks(push_id), timeout=timeout_s)

    async def _chunks(self, push_id: str) -> AsyncIterator[rollout_pb2.SendWeightsRequest]:
        """Yield the chunks; only those that gRPC is sending are in memory."""
        yield rollout_pb2.SendWeightsRequest(push_id=push_id)
        for first in range(0, self.size_bytes, _CHUNK_BYTES):
            yield await asyncio.to_thread(self._chunk, first)

    def _chunk(self, first: int) -> rollout_pb2.SendWeightsRequest:
        data = os.pread(self.file.fileno(), min(_CHUNK_BYTES, self.size_bytes - first), first)
        return rollout_pb2.SendWeightsRequest(data=data, crc32=zlib.crc32(data))


@dataclass(slots=True)
class DeltaStore:
    """Writes the blocks of the newest version."""

    _newest: WeightSnapshot | None = None
    _base: WeightSnapshot | None = None
    """The version before the newest."""
    _written: dict[int, DeltaTransport] = field(default_factory=dict)
    """Written files by base version; 0: all weights."""

    async def move_on(self, weights: WeightSnapshot) -> None:
        """Make `weights` the newest version, and write its delta against the previous one.

        Raises:
            SetupError: there is no room for the delta.
        """
        if self._newest is not None and self._newest.version == weights.version:
            return
        self._newest, self._base = weights, self._newest
        self.close()
        base = self._base
        if base is not None and base.manifest == weights.manifest and base.version > 0:
            self._written[base.version] = await self._write(weights, base)

    def since(self, version: int) -> DeltaTransport | None:
        """Return the changes since `version`; None if they are not known."""
        return self._written.get(version) if version else None

    async def all_weights(self) -> DeltaTransport:
        """Return all weights of the newest version; the first call writes them.

        Raises:
            SetupError: there is no room for them.
        """
        if 0 not in self._written:
            assert self._newest is not None
            self._written[0] = await self._write(self._newest, None)
        return self._written[0]

    def close(self) -> None:
        """Close the files, which removes them."""
        for delta in self._written.values():
            delta.file.close()
        self._written.clear()

    async def _write(self, weights: WeightSnapshot, base: WeightSnapshot | None) -> DeltaTransport:
        started = time.monotonic()
        try:
            delta = await asyncio.to_thread(_write, weights, base)
        except OSError as error:
            raise SetupError(
                f"cannot write {weights.manifest.num_bytes} bytes of weights, compressed, to {tempfile.gettempdir()}: "
                f"{error}; make room, or set TMPDIR to another folder"
            ) from None
        log.info(
            "delta.written",
            version=weights.version,
            base_version=delta.base_version,
            size_bytes=delta.size_bytes,
            num_full_bytes=weights.manifest.num_bytes,
            elapsed_s=round(time.monotonic() - started, 3),
        )
        return delta


def _write(weights: WeightSnapshot, base: WeightSnapshot | None) -> DeltaTransport:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the transport
    old = None if base is None else base.buckets
    try:
        size_bytes = write_blocks(file, weights.manifest, weights.buckets, old=old)
        file.flush()
    except BaseException:
        file.close()
        raise
    return DeltaTransport(file, size_bytes, 0 if base is None else base.version)
