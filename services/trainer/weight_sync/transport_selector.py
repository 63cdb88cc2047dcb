"""Selects a transport per replica: the configured one, or broadcast if the replica cannot use it.

`trainer.weight_sync.transport` names the transport; auto is shared memory if the trainer computes on a CPU, else
broadcast. With delta, replicas without the base version receive all weights. Late joiners read weight files if there
are any.
"""

import asyncio
from collections.abc import Mapping, Sequence

import structlog

from penstock.errors import ChecksumError, NotReadyError, PenstockError
from services.trainer.config import WeightSyncConfig
from services.trainer.weight_sync.push_calls import Member
from services.trainer.weight_sync.push_outcome import PushOutcome
from services.trainer.weight_sync.snapshot import WeightSnapshot
from services.trainer.weight_sync.transports.base import PullTransport, Transport
from services.trainer.weight_sync.transports.broadcast import BroadcastTransport
from services.trainer.weight_sync.transports.delta import DeltaStore, DeltaTransport
from services.trainer.weight_sync.transports.disk import DiskTransport, WeightFileStore
from services.trainer.weight_sync.transports.shared_memory import SharedMemoryTransport

log = structlog.get_logger()


class TransportSelector:
    """Opens transports, and remembers which replicas cannot use which transport."""

    def __init__(
        self, config: WeightSyncConfig, files: WeightFileStore, *, host: str, backend: str, chunk_bytes: int
    ) -> None:
        """Let replicas reach this process at `host`; `backend` is torch.distributed's: nccl or gloo.

        Buckets larger than `chunk_bytes` are broadcast in parts.
        """
        self._host = host
        self._config = config
        self._files = files
        self._backend = backend
        self._chunk_bytes = chunk_bytes
        self._deltas = DeltaStore()
        self._group: BroadcastTransport | None = None
        """The process group of the last broadcast, while its members stay the same."""
        self._unfit: dict[str, set[Member]] = {}
        """Live replicas that could not use a transport, by the transport's name."""

    async def make_ready(self, weights: WeightSnapshot) -> None:
        """Do the preparation that is possible while engines still generate.

        Raises:
            SetupError: there is no room for a delta.
        """
        await asyncio.to_thread(weights.wait)  # computing digests would compete with sending
        if self._config.transport == "disk":
            await self._files.write(weights)
        elif self._config.transport == "delta":
            await self._deltas.move_on(weights)

    def all_read(self, members: Sequence[Member], weights: WeightSnapshot) -> bool:
        """Return whether each of the members, which hold an earlier version, reads `weights` by itself.

        None of them can then keep the others waiting.
        """
        names = [transport.name for transport in self._sources(weights, only_lagging=False)]
        return all(any(member not in self._unfit.get(name, ()) for name in names) for member in members)

    async def next(
        self,
        members: tuple[Member, ...],
        weights: WeightSnapshot,
        *,
        versions: Mapping[Member, int],
        failed_delta: set[Member],
        only_lagging: bool,
    ) -> tuple[tuple[Member, ...], Transport]:
        """Choose some of `members` and their transport; call it again for the rest.

        Args:
            members: One or more.
            weights: The snapshot that was last passed to `make_ready`.
            versions: The version that each member holds, if its weights are intact.
            failed_delta: Members for which the delta to this version has failed.
            only_lagging: Whether the members are catching up, so that no others wait for them.

        Raises:
            SetupError: network.advertise_host is not an address of this machine, or there is no room for a delta.
        """
        for transport in self._sources(weights, only_lagging=only_lagging):
            if readers := self._fit(members, transport.name):
                return readers, transport
        if self._config.transport == "delta":
            return await self._delta(members, versions, failed_delta)
        return members, await self._broadcast(members)

    async def put_back(self, transport: Transport, outcome: PushOutcome) -> None:
        """Take a transport back after its push, to reuse it for the next push to the same members."""
        if isinstance(transport, BroadcastTransport):
            self._group = transport if outcome.is_reusable else None
        elif outcome.failed:
            await self.leave_group()  # a member that aborts a push has left its process group

    def note_failure(self, transport: Transport, member: Member, error: PenstockError, *, stage: str) -> bool:
        """Stop using `transport` for `member` if it caused the failure and there is a fallback; return whether."""
        if isinstance(transport, BroadcastTransport):
            return False
        if isinstance(transport, DeltaTransport):
            return transport.base_version > 0
        refused = stage == "prepare" and isinstance(error, NotReadyError)
        if not (refused or stage == "transfer" or isinstance(error, ChecksumError)):
            return False  # an engine that is slow to pause or commit would be slow with any transport
        log.info("push.transport_unfit", transport=transport.name, replica_id=member.replica_id, reason=str(error))
        self._unfit.setdefault(transport.name, set()).add(member)
        return True

    def forget_the_dead(self, live: set[Member]) -> None:
        """Forget replicas that are not in `live`."""
        for members in self._unfit.values():
            members &= live

    async def close(self) -> None:
        """Leave the process group and close files."""
        self._deltas.close()
        await self.leave_group()

    async def leave_group(self) -> None:
        """Leave the process group that was kept for another push, because a member has left it."""
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(group.close)

    def _sources(self, weights: WeightSnapshot, *, only_lagging: bool) -> list[PullTransport]:
        """Return the transports that members read, the preferred one first."""
        sources: list[PullTransport] = []
        folder = self._files.folder_of(weights.version)
        if folder is not None and (only_lagging or self._config.transport == "disk"):
            sources.append(DiskTransport(folder))
        if weights.shared_memory is not None:
            sources.append(SharedMemoryTransport(weights.shared_memory))
        return sources

    def _fit(self, members: Sequence[Member], name: str) -> tuple[Member, ...]:
        return tuple(member for member in members if member not in self._unfit.get(name, ()))

    async def _delta(
        self, members: tuple[Member, ...], versions: Mapping[Member, int], failed_delta: set[Member]
    ) -> tuple[tuple[Member, ...], DeltaTransport]:
        for version in {versions.get(member, 0) for member in members}:
            delta = self._deltas.since(version)
            near = tuple(
                member
                for member in members
                if versions.get(member) == version and member not in failed_delta and member.num_ranks == 1
            )
            if delta is not None and near:
                return near, delta
        return members, await self._deltas.all_weights()

    async def _broadcast(self, members: tuple[Member, ...]) -> BroadcastTransport:
        group, self._group = self._group, None  # `put_back` returns it if it is reusable
        if group is not None and group.members == members:
            return group
        if group is not None:
            await asyncio.to_thread(group.close)
        return await asyncio.to_thread(
            BroadcastTransport.open,
            members,
            host=self._host,
            backend=self._backend,
            chunk_bytes=self._chunk_bytes,
        )
