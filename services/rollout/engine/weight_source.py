"""Where the weights of a push come from, as what is announced becomes what SGLang's scheduler is told."""

import asyncio
import dataclasses
import json
import os
import tempfile
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self, TypeAlias

from penstock.errors import InvalidRequestError, NotReadyError, UnavailableError
from penstock.v1 import rollout_pb2
from penstock.weights.manifest import Manifest
from penstock.weights.segment import SegmentSource
from penstock.weights.snapshot import check_snapshot

Announced: TypeAlias = (
    "rollout_pb2.WeightGroup | rollout_pb2.WeightSnapshot | rollout_pb2.WeightSegment | rollout_pb2.WeightStream"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One of the four."""

    group_name: str = ""
    """A group that was joined."""
    chunk_bytes: int = 0
    """A larger bucket comes over the group in parts of this size; 0: whole."""
    folder: str = ""
    """A snapshot."""
    segment: SegmentSource | None = None
    """Memory of this machine."""
    pieces: str = ""
    """A file of pieces that were uploaded."""
    is_delta: bool = False
    """Whether the pieces are what changed against the version that is held. Otherwise all comes, whatever is held."""

    @property
    def kind(self) -> str:
        """For the log."""
        if self.pieces:
            return "delta" if self.is_delta else "stream"
        return "group" if self.group_name else "snapshot" if self.folder else "segment"

    def to_json(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        if fields["segment"] is not None:
            fields["segment"] = SegmentSource(**fields["segment"])
        return cls(**fields)


class Spool:
    """A file without a name, into which pieces are uploaded: it is gone when this process is."""

    def __init__(self, size_bytes: int) -> None:
        """Room for so many bytes, in TMPDIR.

        Raises:
            NotReadyError: there is none.
        """
        self.size_bytes = size_bytes
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
        self._filled = 0
        try:
            if size_bytes:
                os.posix_fallocate(self._file.fileno(), 0, size_bytes)
        except OSError as error:
            self.close()
            raise NotReadyError(
                f"no room for an upload of {size_bytes} bytes in {tempfile.gettempdir()} ({error.strerror}); "
                "make some, or let TMPDIR name another folder"
            ) from None

    @property
    def path(self) -> str:
        """By which processes of this engine open it."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    @property
    def is_full(self) -> bool:
        """Whether all has come."""
        return self._filled == self.size_bytes

    async def fill(self, chunks: AsyncIterator[rollout_pb2.SendWeightsRequest]) -> None:
        """Take all chunks.

        Raises:
            InvalidRequestError: they are more or fewer bytes than announced.
            UnavailableError: one is damaged, or cannot be written.
        """
        self._filled = 0
        async for chunk in chunks:
            if self._filled + len(chunk.data) > self.size_bytes:
                break
            await asyncio.to_thread(self._write, chunk)
            self._filled += len(chunk.data)
        else:
            if self.is_full:
                return
        raise InvalidRequestError(f"data: {self.size_bytes} bytes were announced, and not so many came")

    def close(self) -> None:
        """Let go of it."""
        self._file.close()

    def _write(self, chunk: rollout_pb2.SendWeightsRequest) -> None:
        if zlib.crc32(chunk.data) != chunk.crc32:
            raise UnavailableError(f"the upload is damaged after {self._filled} bytes; send it again")
        try:
            os.pwrite(self._file.fileno(), chunk.data, self._filled)
        except OSError as error:
            raise UnavailableError(f"the upload cannot be written to {tempfile.gettempdir()}: {error}") from None


def announced(request: rollout_pb2.PrepareWeightsRequest) -> Announced:
    """The source that a request names.

    Raises:
        InvalidRequestError: it names none.
    """
    field = request.WhichOneof("source")
    if field is None:
        raise InvalidRequestError("a push needs a source: group, snapshot, segment or stream; give one")
    source: Announced = getattr(request, field)
    return source


def check_group(group: rollout_pb2.WeightGroup) -> Source:
    """A group that is still to be joined.

    Raises:
        InvalidRequestError: it makes no sense.
    """
    if not group.name or group.rank_offset < 1 or group.world_size <= group.rank_offset:
        raise InvalidRequestError(
            f"group {group.name!r}: rank_offset {group.rank_offset} and world_size {group.world_size} do not form "
            "a group in which the trainer is rank 0"
        )
    if group.chunk_bytes < 0:
        raise InvalidRequestError(f"group {group.name!r}: chunk_bytes = {group.chunk_bytes} must be 0 or greater")
    return Source(group_name=group.name, chunk_bytes=group.chunk_bytes)


def check_readable(
    source: rollout_pb2.WeightSnapshot | rollout_pb2.WeightSegment, version: int, manifest: Manifest
) -> Source:
    """A snapshot or a segment that can be read from here. Blocking.

    Raises:
        NotReadyError: it cannot.
    """
    if isinstance(source, rollout_pb2.WeightSegment):
        return Source(segment=SegmentSource.of(source))
    check_snapshot(Path(source.folder), version, manifest)
    return Source(folder=source.folder)


def check_base(base_version: int, held: int, *, sound: bool) -> None:
    """See that a delta fits.

    Raises:
        NotReadyError: it is against other weights than these.
    """
    if base_version and (base_version != held or not sound):
        weights = f"version {held}" if sound else "broken weights"
        raise NotReadyError(f"the delta is against version {base_version}, but this engine holds {weights}; send all")
