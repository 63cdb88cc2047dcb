"""WeightPublisher: brings every live replica to the published policy version, and keeps it there.

Invariants: a replica generates again only after the digest of every parameter it holds equals the trainer's. No stage
outlasts its deadline, so a replica that dies or hangs costs one deadline and the others get their weights. A failed
replica is retried alone, so that it cannot spoil a push to others. A publication interrupts the retry, so that training
does not wait for it; after two interruptions it waits, so that a slow replica comes back. Weights are pushed from a
snapshot, so a replica that joins between two steps gets exactly the published version. Replicas that an evaluation
holds out keep its version instead, and catch up like late joiners when it has ended.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
import torch

from penstock.bus.buckets.watch import Watch
from penstock.runtime.security import Security
from penstock.v1 import common_pb2
from penstock.weights.adapters import adapted_weights
from penstock.weights.manifest import MAX_BUCKET_BYTES
from penstock.weights.named_weights import NamedWeights
from penstock.weights.shared_memory import SharedMemoryPool
from services.trainer.config import WeightSyncConfig
from services.trainer.weight_sync.deadlines import PushDeadlines
from services.trainer.weight_sync.failed_replicas import FailedReplicas
from services.trainer.weight_sync.held_out.choice import can_spare, choose_held_out
from services.trainer.weight_sync.held_out.hold_out import HoldOut
from services.trainer.weight_sync.push import Push
from services.trainer.weight_sync.push_calls import Member, all_done
from services.trainer.weight_sync.push_report import PushReport
from services.trainer.weight_sync.replica_pool import ReplicaPool, member_of, serves
from services.trainer.weight_sync.snapshot import WeightSnapshot
from services.trainer.weight_sync.transport_selector import TransportSelector
from services.trainer.weight_sync.transports.disk import WeightFileStore

log = structlog.get_logger()

_CATCH_UP_EVERY_S = 1.0
_LOOK_EVERY_S = 0.1
"""Seconds between looks at the leases. In a large pool they change hundreds of times a second, and each look reads all
of them."""


@dataclass(frozen=True, slots=True)
class _Retry:
    """Another push to a failed replica."""

    member: Member
    task: asyncio.Task[None]


@dataclass(slots=True, kw_only=True)
class WeightPublisher:
    """Pushes snapshots to replicas. One push at a time."""

    config: WeightSyncConfig
    host: str
    """Name or address of this process, for the process group of a broadcast."""
    replicas: Watch
    """The `replicas` bucket."""
    backend: str
    """torch.distributed backend of broadcasts: nccl or gloo."""
    files: WeightFileStore
    """Writes weight files if configured; late joiners read them."""
    security: Security
    """Tokens and TLS of the calls to replicas."""
    keeps_on_host: bool = False
    """Whether snapshots are in the host's memory: the weights are sharded or offloaded, so a GPU has no room for a full
    copy."""
    failed_replicas: FailedReplicas = field(default_factory=FailedReplicas)
    max_bucket_bytes: int = MAX_BUCKET_BYTES
    _current: WeightSnapshot | None = None
    _base_digests: Mapping[str, int] = field(default_factory=dict)
    """Those of the last snapshot; the base of adapters stays the same."""
    _hold_out: HoldOut | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _retry: _Retry | None = None
    """The running retry of a failed replica. It takes the lock itself, and may be cancelled at any time."""
    _deadlines: PushDeadlines = field(init=False)
    _selector: TransportSelector = field(init=False)
    _pool: ReplicaPool = field(init=False)
    _memory: SharedMemoryPool = field(default_factory=SharedMemoryPool)

    def __post_init__(self) -> None:
        """Create the parts, without opening connections or files."""
        self._deadlines = PushDeadlines.of(self.config)
        self._selector = TransportSelector(
            self.config, self.files, host=self.host, backend=self.backend, chunk_bytes=self.max_bucket_bytes
        )
        self._pool = ReplicaPool(
            replicas=self.replicas,
            failed=self.failed_replicas,
            security=self.security,
            answer_within_s=self._deadlines.control_s,
        )

    def take(self, version: int, weights: NamedWeights) -> WeightSnapshot:
        """Copy the trainer's weights for `publish`. Blocking: it reads every byte.

        Raises:
            ValueError: a name occurs twice, or the weights differ from their announced specs.
        """
        self._base_digests = weights.base_digests
        is_offered = self.config.shares_memory(on_gpu=self.backend == "nccl")
        return WeightSnapshot.take(
            version,
            weights,
            max_bucket_bytes=self.max_bucket_bytes,
            pool=self._memory if is_offered or self.keeps_on_host else None,
            is_offered=is_offered,
            device=torch.device("cpu") if self.keeps_on_host else None,
        )

    async def publish(
        self, weights: WeightSnapshot, *, on_half_served: Callable[[], None] = lambda: None
    ) -> PushReport:
        """Make `weights` the published version and push it to every live replica.

        Replicas that fail now or have failed before are skipped and brought up to date later, as are those that an
        evaluation holds out. Having no replicas is not an error. A running retry is interrupted; a running catch-up is
        completed first.

        Args:
            weights: The snapshot that `take` returned.
            on_half_served: Called when half of the replicas in the push serve the version. From then on, calls that
                want it find enough replicas.

        Raises:
            SetupError: network.advertise_host is not an address of this machine, or there is no room for a delta.
        """
        await self._end_retry()
        async with self._lock:
            await self._selector.make_ready(weights)
            self._current = weights
            members = self._pool.pushable(lambda replica: not self._is_held_out(replica))
            sound = [member for member in members if member not in self.failed_replicas]
            push = self._new_push(weights, self._selector, on_half_served=on_half_served)
            report = await push.run(sound)
        self.files.write_soon(weights)
        return report

    async def keep_current(self) -> None:
        """Push the published version to replicas that lack it, such as ones that have just joined, until cancelled.

        Raises:
            SetupError: network.advertise_host is not an address of this machine.
        """
        known = -1
        while True:
            await self.replicas.changed(_CATCH_UP_EVERY_S, since=known)
            known = self.replicas.num_changes
            async with self._lock:
                self._selector.forget_the_dead(await self._pool.forget_the_dead())
                if self._hold_out is not None:
                    await self._keep_held_out(self._hold_out)
                fresh = [member for member in self._lagging() if member not in self.failed_replicas]
                if self._current is not None and fresh:
                    await self._catch_up(self._current, fresh)
            for member in self.failed_replicas.due(now=time.monotonic()):
                retry = asyncio.create_task(self._try_again(member))
                self._retry = _Retry(member, retry)
                await all_done([retry])
                if not retry.cancelled():
                    retry.result()
            await asyncio.sleep(_LOOK_EVERY_S)

    @property
    def num_live_replicas(self) -> int:
        """Number of replicas with a lease that have finished loading."""
        return self._pool.num_loaded

    @property
    def current(self) -> WeightSnapshot | None:
        """The published weights."""
        return self._current

    def can_hold_out(self, num: int, *, version: int) -> bool:
        """Return whether training has replicas left if `num` are held out."""
        replicas = self._pool.sound()
        return can_spare(replicas, choose_held_out(replicas, (), num=num, version=version))

    async def hold_out(self, hold_out: HoldOut) -> bool:
        """Stop pushing to some replicas, if training has others left; return whether it does.

        A held-out replica that dies is replaced by another, which receives the weights that `hold_out` keeps.
        """
        async with self._lock:
            if await hold_out.begin(self._pool.sound()):
                self._hold_out = hold_out
        return self._hold_out is hold_out

    async def go_on_holding_out(self, hold_out: HoldOut) -> None:
        """Hold out again what an earlier trainer held out. Call before anything is published.

        Further replicas are chosen as they join.
        """
        async with self._lock:
            await hold_out.update(self._pool.sound())
            self._hold_out = hold_out

    async def release_held_out(self) -> None:
        """Stop holding replicas out; they catch up. Once this returns, nothing writes the hold-out's record."""
        self._hold_out = None  # a look that waits for the lock replaces no replica
        async with self._lock:
            pass  # a look that held the lock has ended

    async def close(self) -> None:
        """Leave the process group, finish writing weight files, and close all channels."""
        await self._selector.close()
        await self.files.close()
        await self._pool.close()

    async def _try_again(self, member: Member) -> None:
        async with self._lock:
            if self._current is not None and member in self._lagging():
                await self._catch_up(self._current, [member])
            else:
                self.failed_replicas.remove(member)  # it already has the version, or is gone

    async def _end_retry(self) -> None:
        """Interrupt the running retry and those that follow it. That is not a failure: the replicas stay due.

        A retry that was interrupted twice before is awaited instead, at most one per publication.
        """
        has_awaited = False
        while self._retry is not None and not self._retry.task.done():
            retry = self._retry
            if not has_awaited and not self.failed_replicas.may_interrupt(retry.member):
                has_awaited = True
                log.info("push.retry_awaited", replica_id=retry.member.replica_id)
                await asyncio.wait([retry.task])
                continue
            retry.task.cancel()
            await asyncio.wait([retry.task])  # its replica is told, and its transport closed
            self.failed_replicas.interrupted(retry.member)
            log.info("push.retry_interrupted", replica_id=retry.member.replica_id)

    def _lagging(self) -> list[Member]:
        """Return the replicas that lack the published version, by their leases."""
        if self._current is None:
            return []
        version = self._current.version
        return self._pool.pushable(lambda replica: not serves(replica, version) and not self._is_held_out(replica))

    def _is_held_out(self, replica: common_pb2.Replica) -> bool:
        return self._hold_out is not None and replica.replica_id in self._hold_out.replica_ids

    async def _catch_up(self, weights: WeightSnapshot, members: Sequence[Member]) -> None:
        await self._new_push(weights, self._selector, only_lagging=True).run(members)

    async def _keep_held_out(self, hold_out: HoldOut) -> None:
        """Replace held-out replicas that died or failed, and give those that lack the version its weights."""
        chosen = await hold_out.update(self._pool.sound())
        lagging = [member_of(replica) for replica in chosen if not serves(replica, hold_out.version)]
        if not lagging:
            return
        weights, selector = await hold_out.open_weights(
            self.config,
            host=self.host,
            backend=self.backend,
            keeps_on_host=self.keeps_on_host,
            max_bucket_bytes=self.max_bucket_bytes,
        )
        try:
            if adapted_weights(weights.manifest) and not self._base_digests:
                return  # the trainer's base is known once the first version is taken, within seconds of the start
            weights = dataclasses.replace(weights, base_digests=self._base_digests)
            await self._selector.leave_group()  # a member that joins another group leaves this one
            await selector.make_ready(weights)
            await self._new_push(weights, selector, only_lagging=True, replaces_newer=True).run(lagging)
        finally:
            await selector.close()

    def _new_push(
        self,
        weights: WeightSnapshot,
        selector: TransportSelector,
        *,
        only_lagging: bool = False,
        replaces_newer: bool = False,
        on_half_served: Callable[[], None] = lambda: None,
    ) -> Push:
        return Push(
            weights,
            self._pool,
            selector,
            config=self.config,
            deadlines=self._deadlines,
            only_lagging=only_lagging,
            replaces_newer=replaces_newer,
            on_half_served=on_half_served,
        )
