"""Which way the weights go to which replica: the one that was asked for, and where it does not go, the next fuller one.

push.transport names the way, or leaves it to the trainer's device; where a replica has turned out not to be able to
use it, weights are broadcast to it. With delta they come as a stream to all: what changed, or the whole. A late joiner
reads the snapshot, if one is written.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import structlog
import torch

from penstock.errors import NotReadyError, PenstockError
from penstock.weights.segment import Segments
from services.trainer.config import PushConfig
from services.trainer.push.attempt import ChecksumError, Outcome
from services.trainer.push.pieces import Pieces
from services.trainer.push.published_weights import PublishedWeights
from services.trainer.push.snapshots import Snapshots
from services.trainer.push.stages import Member
from services.trainer.push.transport import Broadcast, Disk, Ipc, Stream, Transport

log = structlog.get_logger()


class Ways:
    """Gives out transports, and keeps in mind which replica cannot use which."""

    def __init__(self, config: PushConfig, snapshots: Snapshots, *, backend: str) -> None:
        """`backend` is torch.distributed's: nccl or gloo."""
        self._config = config
        self._snapshots = snapshots
        self._backend = backend
        self._pieces = Pieces()
        self._segments = Segments()
        self._epoch: Broadcast | None = None
        self._unfit: dict[str, set[Member]] = {}
        """By the kind of transport: those that could not use it, while they live."""

    def take(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> PublishedWeights:
        """A snapshot of `tensors` that can go the way that was asked for. See `PublishedWeights.take`."""
        named = tuple(tensors)
        on_cpu = all(tensor.device.type == "cpu" for _, tensor in named)
        shared = self._config.transport == "ipc" or (self._config.transport == "auto" and on_cpu)
        return PublishedWeights.take(
            version, named, max_bucket_bytes=self._config.bucket_bytes, segments=self._segments if shared else None
        )

    async def make_ready(self, weights: PublishedWeights) -> None:
        """What can be done while engines still generate.

        Raises:
            SetupError: there is no room for a delta.
        """
        await asyncio.to_thread(weights.wait)  # cores that compute digests send nothing
        if self._config.transport == "disk":
            await self._snapshots.write(weights)
        elif self._config.transport == "delta":
            await self._pieces.move_on(weights)

    async def next(
        self,
        members: tuple[Member, ...],
        weights: PublishedWeights,
        *,
        held: Mapping[Member, int],
        failed_delta: set[Member],
        only_lagging: bool,
    ) -> tuple[tuple[Member, ...], Transport]:
        """Some of `members`, and how they get the weights; the others are for the next time.

        Args:
            members: One or more.
            weights: Those for which `make_ready` was called last.
            held: The version that each holds, whole.
            failed_delta: Those for which the delta to this version was of no use.
            only_lagging: They are late, and others wait for nothing.

        Raises:
            SetupError: this machine cannot be reached at push.host, or has no room.
        """
        folder = self._snapshots.newest(weights.version)
        wants_snapshot = only_lagging or self._config.transport == "disk"
        if folder is not None and wants_snapshot and (readers := self._fit(members, Disk.kind)):
            return readers, Disk(folder)
        if self._config.transport == "delta":
            return await self._streamed(members, held, failed_delta)
        segment = weights.segment
        if segment is not None and (near := self._fit(members, Ipc.kind)):
            return near, Ipc(segment)
        return members, await self._broadcast(members)

    async def keep(self, transport: Transport, outcome: Outcome) -> None:
        """Take a transport back after its attempt, for the next one to the same members."""
        if isinstance(transport, Broadcast):
            self._epoch = transport if outcome.is_reusable else None
        elif outcome.failed:
            await self._end_epoch()  # who gives up a push leaves its group

    def note_failure(self, transport: Transport, member: Member, error: PenstockError, *, stage: str) -> bool:
        """Offer it to `member` no more, if it was to blame and there is a fuller one; returns whether that is so."""
        if isinstance(transport, Broadcast):
            return False
        if isinstance(transport, Stream):
            return transport.base_version > 0
        refused = stage == "prepare" and isinstance(error, NotReadyError)
        if not (refused or stage == "transfer" or isinstance(error, ChecksumError)):
            return False  # an engine that does not pause or resume in time would not do so with another way either
        log.info("push.way_closed", way=transport.kind, replica_id=member.replica_id, reason=str(error))
        self._unfit.setdefault(transport.kind, set()).add(member)
        return True

    def forget_the_dead(self, live: set[Member]) -> None:
        """Keep in mind only what is known of the living."""
        for members in self._unfit.values():
            members &= live

    async def close(self) -> None:
        """Leave the process group, and let go of files."""
        self._pieces.close()
        await self._end_epoch()

    async def _end_epoch(self) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            await asyncio.to_thread(epoch.close)

    def _fit(self, members: Sequence[Member], kind: str) -> tuple[Member, ...]:
        return tuple(member for member in members if member not in self._unfit.get(kind, ()))

    async def _streamed(
        self, members: tuple[Member, ...], held: Mapping[Member, int], failed_delta: set[Member]
    ) -> tuple[tuple[Member, ...], Stream]:
        for version in {held.get(member, 0) for member in members}:
            delta = self._pieces.delta_for(version)
            near = tuple(one for one in members if held.get(one) == version and one not in failed_delta)
            if delta is not None and near:
                return near, delta
        return members, await self._pieces.whole()

    async def _broadcast(self, members: tuple[Member, ...]) -> Broadcast:
        """Over the group that these members form with the trainer; it is kept while they stay the same."""
        epoch, self._epoch = self._epoch, None  # it is the attempt's until that tells that it is still fit
        if epoch is not None and epoch.members == members:
            return epoch
        if epoch is not None:
            await asyncio.to_thread(epoch.close)
        return await asyncio.to_thread(
            Broadcast.open,
            members,
            host=self._config.host,
            backend=self._backend,
            chunk_bytes=self._config.bucket_bytes,
        )
