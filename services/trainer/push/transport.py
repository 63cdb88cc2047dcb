"""How the bytes of a push travel: over a process group, as files, in shared memory, or as a stream of pieces.

One interface for all, so that stages, deadlines and failures are the same whatever carries the weights.
"""

import asyncio
import os
import uuid
import zlib
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol

from penstock.v1 import rollout_pb2
from penstock.weights.manifest import chunks
from penstock.weights.segment import Segment
from services.trainer.push.published_weights import PublishedWeights
from services.trainer.push.stages import Member, Stub
from services.trainer.push.weight_group import WeightGroup

_CHUNK_BYTES = 1 << 20


class Transport(Protocol):
    """What carries the weights to the members of one attempt. `form`, `send` and `close` block."""

    @property
    def kind(self) -> str:
        """Its name in the log."""

    @property
    def is_formed(self) -> bool:
        """Whether members are connected already; if not, `form` is called while they prepare."""

    @property
    def is_closed(self) -> bool:
        """Whether it is of no use any more."""

    def announce(self, member: Member, request: rollout_pb2.PrepareWeightsRequest) -> None:
        """Write into the request how this member gets the weights."""

    def form(self, *, timeout_s: float) -> None:
        """The trainer's part while members prepare."""

    def upload(self, stub: Stub, push_id: str, *, timeout_s: float) -> Awaitable[object] | None:
        """What a member that has prepared is sent while it still generates, as a call; None: nothing."""

    def send(self, weights: PublishedWeights, *, timeout_s: float) -> None:
        """The trainer's part while members receive."""

    def close(self, *, num_coming: int = 0) -> None:
        """Let go of it, and of every member that waits in it; see `WeightGroup.close`."""


@dataclass(slots=True)
class Broadcast:
    """A torch.distributed group: NCCL between GPUs, gloo between CPUs. It lasts while membership does."""

    kind: ClassVar[str] = "broadcast"
    members: tuple[Member, ...]
    message: rollout_pb2.WeightGroup
    group: WeightGroup
    is_formed: bool = False

    @classmethod
    def open(cls, members: tuple[Member, ...], *, host: str, backend: str, chunk_bytes: int) -> "Broadcast":
        """Open the rendezvous; more than `chunk_bytes` are broadcast in parts. Blocking.

        Raises:
            SetupError: this machine cannot be reached at `host`.
        """
        name, world_size = f"epoch-{uuid.uuid4().hex[:12]}", 1 + len(members)
        group = WeightGroup.listen(host=host, name=name, world_size=world_size, backend=backend)
        message = rollout_pb2.WeightGroup(
            name=name,
            master_host=host,
            master_port=group.port,
            world_size=world_size,
            backend=backend,
            chunk_bytes=chunk_bytes,
        )
        return cls(members, message, group)

    @property
    def is_closed(self) -> bool:
        """Whether the group has ended."""
        return self.group.is_closed

    def announce(self, member: Member, request: rollout_pb2.PrepareWeightsRequest) -> None:
        """The group, and the member's rank in it."""
        request.group.CopyFrom(self.message)
        request.group.rank_offset = 1 + self.members.index(member)

    def form(self, *, timeout_s: float) -> None:
        """Meet the members."""
        self.group.form(timeout_s=timeout_s)
        self.is_formed = True

    def upload(self, stub: Stub, push_id: str, *, timeout_s: float) -> Awaitable[object] | None:
        """Nothing."""
        return None

    def send(self, weights: PublishedWeights, *, timeout_s: float) -> None:
        """Send all buckets."""
        parts = (part for bucket in weights.buckets for part in chunks(bucket, self.message.chunk_bytes))
        self.group.broadcast(parts, timeout_s=timeout_s)

    def close(self, *, num_coming: int = 0) -> None:
        """Leave the group."""
        self.group.close(num_coming=num_coming)


class _Pulled:
    """Members fetch it by themselves, and nobody waits for anybody."""

    is_formed = True
    is_closed = False

    def form(self, *, timeout_s: float) -> None:
        """There is nobody to meet."""

    def upload(self, stub: Stub, push_id: str, *, timeout_s: float) -> Awaitable[object] | None:
        """Nothing."""
        return None

    def send(self, weights: PublishedWeights, *, timeout_s: float) -> None:
        """It is there already."""

    def close(self, *, num_coming: int = 0) -> None:
        """It stays for others."""


@dataclass(frozen=True)
class Disk(_Pulled):
    """A snapshot."""

    kind: ClassVar[str] = "snapshot"
    folder: Path

    def announce(self, member: Member, request: rollout_pb2.PrepareWeightsRequest) -> None:
        """The folder."""
        request.snapshot.folder = str(self.folder)


@dataclass(frozen=True)
class Ipc(_Pulled):
    """Memory that the members open, on this machine. The weights hold it."""

    kind: ClassVar[str] = "ipc"
    segment: Segment

    def announce(self, member: Member, request: rollout_pb2.PrepareWeightsRequest) -> None:
        """How to open it."""
        request.segment.CopyFrom(self.segment.message)


@dataclass(frozen=True)
class Stream(_Pulled):
    """Compressed pieces, sent to each member before it pauses."""

    file: BinaryIO
    """Read by offsets, so that several members can be sent to at a time."""
    size_bytes: int
    base_version: int
    """That of the members, if the pieces are against it; 0: they are all of it."""

    @property
    def kind(self) -> str:
        """A delta, or all."""
        return "delta" if self.base_version else "stream"

    def announce(self, member: Member, request: rollout_pb2.PrepareWeightsRequest) -> None:
        """How much will come."""
        request.stream.base_version = self.base_version
        request.stream.size_bytes = self.size_bytes

    def upload(self, stub: Stub, push_id: str, *, timeout_s: float) -> Awaitable[object]:
        """All pieces."""
        return stub.SendWeights(self._chunks(push_id), timeout=timeout_s)

    async def _chunks(self, push_id: str) -> AsyncIterator[rollout_pb2.SendWeightsRequest]:
        """One chunk is in memory at a time, and those that gRPC has under way."""
        yield rollout_pb2.SendWeightsRequest(push_id=push_id)
        for first in range(0, self.size_bytes, _CHUNK_BYTES):
            yield await asyncio.to_thread(self._chunk, first)

    def _chunk(self, first: int) -> rollout_pb2.SendWeightsRequest:
        data = os.pread(self.file.fileno(), min(_CHUNK_BYTES, self.size_bytes - first), first)
        return rollout_pb2.SendWeightsRequest(data=data, crc32=zlib.crc32(data))
