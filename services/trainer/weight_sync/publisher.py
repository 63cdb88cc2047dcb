"""WeightPublisher: brings every live replica to the published policy version, and keeps it there.

Invariants: a replica generates again only after the digest of every parameter it holds equals the trainer's. No stage
outlasts its deadline, so a replica that dies or hangs costs one deadline and the others get their weights. A failed
replica is retried alone, so that it cannot spoil a push to others. A publication interrupts the retry, so that training
does not wait for it; only after two interruptions it waits, so that a slow replica comes back. Weights are pushed from
a snapshot, so a replica that joins between two steps gets exactly the published version. Replicas that an evaluation
holds out keep its version instead, and catch up as late joiners do when it has ended.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import grpc.aio
import structlog
import torch

from penstock.bus.buckets.replica_lease import ReplicaLeases
from penstock.bus.buckets.watch import Watch
from penstock.errors import NotReadyError, PenstockError, UnavailableError
from penstock.rpc.channel import connect
from penstock.runtime.security import Security
from penstock.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc
from penstock.weights.shared_memory import SharedMemoryPool
from services.trainer.config import WeightSyncConfig
from services.trainer.weight_sync.collective_push import CollectivePush
from services.trainer.weight_sync.deadlines import PushDeadlines
from services.trainer.weight_sync.failed_replicas import FailedReplicas
from services.trainer.weight_sync.held_out.choice import can_spare, choose_held_out
from services.trainer.weight_sync.held_out.hold_out import HoldOut
from services.trainer.weight_sync.push_calls import Member, NoMembersLeftError, PushCalls, Stub, all_done
from services.trainer.weight_sync.push_order import in_turn
from services.trainer.weight_sync.push_outcome import PushOutcome
from services.trainer.weight_sync.push_report import PushReport
from services.trainer.weight_sync.push_stages import ChecksumError, PushStages
from services.trainer.weight_sync.rolling_push import RollingPush
from services.trainer.weight_sync.snapshot import WeightSnapshot
from services.trainer.weight_sync.transport_selector import TransportSelector
from services.trainer.weight_sync.transports.base import CollectiveTransport, Transport
from services.trainer.weight_sync.transports.disk import WeightFileStore

log = structlog.get_logger()

# Only one push runs at a time, so a replica that is UPDATING was left behind by an earlier push, or its lease is old.
_PUSHABLE = (
    common_pb2.REPLICA_STATE_READY,
    common_pb2.REPLICA_STATE_UPDATING,
    common_pb2.REPLICA_STATE_BROKEN,
)
_READY = common_pb2.REPLICA_STATE_READY
_CATCH_UP_EVERY_S = 1.0
_LOOK_EVERY_S = 0.1
"""Leases of a large pool are renewed hundreds of times a second, and each look reads all of them."""


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
    """torch.distributed back end of broadcasts: nccl or gloo."""
    files: WeightFileStore
    """Writes weight files if so configured; late joiners read them."""
    failed_replicas: FailedReplicas = field(default_factory=FailedReplicas)
    security: Security | None = None
    """Tokens and TLS of the calls to replicas; None: the tokens of the environment."""
    _current: WeightSnapshot | None = None
    _hold_out: HoldOut | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _channels: dict[Member, grpc.aio.Channel] = field(default_factory=dict)
    _held: dict[Member, int] = field(default_factory=dict)
    """The version that each replica reported last; 0 if its weights are not sound."""
    _retry: _Retry | None = None
    """The running retry of a failed replica. It takes the lock itself, and may be cancelled at any time."""
    _leases: ReplicaLeases = field(default_factory=ReplicaLeases)
    _deadlines: PushDeadlines = field(init=False)
    _selector: TransportSelector = field(init=False)
    _pool: SharedMemoryPool = field(default_factory=SharedMemoryPool)

    def __post_init__(self) -> None:
        """Nothing is opened yet."""
        self._deadlines = PushDeadlines.of(self.config)
        self._selector = TransportSelector(self.config, self.files, host=self.host, backend=self.backend)

    def take(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightSnapshot:
        """Copy the trainer's parameters (checkpoint name, tensor) for `publish`. Blocking: it reads every byte.

        Raises:
            ValueError: a name occurs twice, or one tensor has two names.
        """
        named = tuple(tensors)
        on_cpu = all(tensor.device.type == "cpu" for _, tensor in named)
        transport = self.config.transport
        is_shared = transport == "shared_memory" or (transport == "auto" and on_cpu)
        return WeightSnapshot.take(
            version, named, max_bucket_bytes=self.config.bucket_bytes, pool=self._pool if is_shared else None
        )

    async def publish(
        self, weights: WeightSnapshot, *, on_half_served: Callable[[], None] = lambda: None
    ) -> PushReport:
        """Make `weights` the published version and push it to every live replica.

        Replicas that fail now or have failed before are skipped and brought up to date later, as are those that an
        evaluation holds out. It is no error if there are no replicas. A running retry is interrupted; a running
        catch-up is completed first.

        Args:
            weights: What `take` returned.
            on_half_served: Called when half of the replicas that are pushed to serve the version. From then on calls
                that want it find enough of them.

        Raises:
            SetupError: network.advertise_host is not an address of this machine, or there is no room for a delta.
        """
        await self._end_retry()
        async with self._lock:
            await self._selector.make_ready(weights)
            self._current = weights
            members = self._members(lambda replica: replica.state in _PUSHABLE and not self._is_held_out(replica))
            sound = [member for member in members if member not in self.failed_replicas]
            report = await self._push(weights, sound, on_half_served=on_half_served)
        self.files.write_soon(weights)
        return report

    async def keep_current(self) -> None:
        """Until cancelled: push the published version to replicas that lack it, such as ones that have just joined.

        Raises:
            SetupError: network.advertise_host is not an address of this machine.
        """
        while True:
            await self.replicas.changed(_CATCH_UP_EVERY_S)
            async with self._lock:
                await self._forget_the_dead()
                if self._hold_out is not None:
                    await self._keep_held_out(self._hold_out)
                fresh = [member for member in self._lagging() if member not in self.failed_replicas]
                if self._current is not None and fresh:
                    await self._push(self._current, fresh, only_lagging=True)
            for member in self.failed_replicas.due(now=time.monotonic()):
                retry = asyncio.create_task(self._try_again(member))
                self._retry = _Retry(member, retry)
                await all_done([retry])
                if not retry.cancelled():
                    retry.result()
            await asyncio.sleep(_LOOK_EVERY_S)

    @property
    def num_live_replicas(self) -> int:
        """Replicas with a lease that have finished loading."""
        return len(self._members(lambda replica: replica.state != common_pb2.REPLICA_STATE_STARTING))

    @property
    def current(self) -> WeightSnapshot | None:
        """The published weights."""
        return self._current

    def can_hold_out(self, num: int, *, version: int) -> bool:
        """Return whether training has replicas left if `num` are held out."""
        replicas = self._sound_replicas()
        return can_spare(replicas, choose_held_out(replicas, (), num=num, version=version))

    async def hold_out(self, hold_out: HoldOut) -> bool:
        """Push no more to some replicas, if training has others left; return whether.

        One that dies is replaced by another, which is given the weights that `hold_out` keeps.
        """
        async with self._lock:
            if await hold_out.begin(self._sound_replicas()):
                self._hold_out = hold_out
        return self._hold_out is hold_out

    async def go_on_holding_out(self, hold_out: HoldOut) -> None:
        """Hold out what an earlier trainer did, before anything is published; replicas are chosen as they come."""
        async with self._lock:
            await hold_out.update(self._sound_replicas())
            self._hold_out = hold_out

    async def release_held_out(self) -> None:
        """Hold nothing out any more; the replicas catch up."""
        async with self._lock:
            self._hold_out = None

    async def close(self) -> None:
        """Leave the process group, finish writing weight files, and close all channels."""
        await self._selector.close()
        await self.files.close()
        for member in tuple(self._channels):
            await self._disconnect(member)

    async def _try_again(self, member: Member) -> None:
        async with self._lock:
            if self._current is not None and member in self._lagging():
                await self._push(self._current, [member], only_lagging=True)
            else:
                self.failed_replicas.remove(member)  # it has the version by now, or is gone

    async def _end_retry(self) -> None:
        """Interrupt the running retry and those that follow it. That is not a failure: the replicas stay due.

        A retry that was interrupted before is awaited instead, one for each publication.
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
        """Replicas that lack the published version, by their leases."""
        if self._current is None:
            return []
        version = self._current.version
        return self._members(
            lambda replica: (
                replica.state in _PUSHABLE and not _is_at(version, replica) and not self._is_held_out(replica)
            )
        )

    def _is_held_out(self, replica: common_pb2.Replica) -> bool:
        return self._hold_out is not None and replica.replica_id in self._hold_out.replica_ids

    async def _keep_held_out(self, hold_out: HoldOut) -> None:
        """Replace held-out replicas that died or failed, and give those that lack the version its weights."""
        chosen = await hold_out.update(self._sound_replicas())
        lagging = [_member(replica) for replica in chosen if not _is_at(hold_out.version, replica)]
        if not lagging:
            return
        weights, selector = await hold_out.open_weights(self.config, host=self.host, backend=self.backend)
        await self._selector.leave_group()  # whoever joins another leaves this one
        try:
            await selector.make_ready(weights)
            await self._push(weights, lagging, only_lagging=True, selector=selector, replaces_newer=True)
        finally:
            await selector.close()

    def _sound_replicas(self) -> list[common_pb2.Replica]:
        """Replicas that can take a push, and have not failed in the last one."""
        replicas = self._leases.read(self.replicas.values).values()
        return [one for one in replicas if one.state in _PUSHABLE and _member(one) not in self.failed_replicas]

    def _members(self, wanted: Callable[[common_pb2.Replica], bool]) -> list[Member]:
        replicas = self._leases.read(self.replicas.values).values()
        return [_member(one) for one in in_turn(filter(wanted, replicas))]

    async def _push(
        self,
        weights: WeightSnapshot,
        members: Sequence[Member],
        *,
        only_lagging: bool = False,
        on_half_served: Callable[[], None] = lambda: None,
        selector: TransportSelector | None = None,
        replaces_newer: bool = False,
    ) -> PushReport:
        """Push to `members`, dropping those that fail. After wrong checksums a member is pushed to once more."""
        started = time.monotonic()
        failed: dict[Member, PenstockError] = {}
        done: list[Member] = []
        stages_s: dict[str, float] = {}
        paused_s: dict[Member, float] = {}
        repeated: set[Member] = set()
        failed_delta: set[Member] = set()
        selector = selector or self._selector
        lagging_behind = weights.version if only_lagging else None
        left = await self._answering(tuple(members), failed, lagging_behind=lagging_behind)
        num_missing = -(-len(left) // 2)

        def count() -> None:
            nonlocal num_missing
            num_missing -= 1
            if num_missing == 0:
                on_half_served()

        while left:
            part, transport = await selector.next(
                left, weights, held=self._held, failed_delta=failed_delta, only_lagging=only_lagging
            )
            stages = PushStages(
                weights, transport, config=self.config, deadlines=self._deadlines, replaces_newer=replaces_newer
            )
            try:
                outcome = await self._run(stages, transport, part, on_served=count)
            except asyncio.CancelledError:
                await self._selector.leave_group()  # a member that was told has left it, whatever it was pushed over
                raise
            await selector.put_back(transport, outcome)
            done += outcome.done
            for member, seconds in outcome.paused_s.items():
                paused_s[member] = paused_s.get(member, 0.0) + seconds
            for stage, seconds in outcome.stages_s.items():
                stages_s[stage] = stages_s.get(stage, 0.0) + seconds
            left = tuple(member for member in left if member not in outcome.done and member not in outcome.failed)
            for member, error in outcome.failed.items():
                has_fallback = selector.note_failure(transport, member, error, stage=outcome.failed_in[member])
                failed_delta.add(member)
                if has_fallback and isinstance(error, NotReadyError):
                    log.info(
                        "push.fell_back", replica_id=member.replica_id, transport=transport.name, reason=str(error)
                    )
                elif isinstance(error, ChecksumError) and member not in repeated:
                    log.warning("push.repeated", replica_id=member.replica_id, reason=str(error))
                    repeated.add(member)
                else:
                    failed[member] = error
                    continue
                left = (*left, member)
            left = tuple(member for member in members if member in left)
        push_s = time.monotonic() - started
        for member in done:
            self.failed_replicas.remove(member)
        for member, error in failed.items():
            await self._record_failure(member, error, weights.version)
        report = PushReport(
            version=weights.version,
            num_replicas=len(done),
            num_failed=len(failed),
            num_bytes=weights.manifest.num_bytes,
            push_s=push_s,
            pause_s=statistics.fmean(paused_s.values()) if paused_s else 0.0,
            stages_s=stages_s,
        )
        if done or failed or not only_lagging:
            log.info(
                "weights.pushed",
                version=report.version,
                num_replicas=report.num_replicas,
                num_failed=report.num_failed,
                num_bytes=report.num_bytes,
                push_s=round(report.push_s, 4),
                pause_s=round(report.pause_s, 4),
            )
        return report

    async def _run(
        self,
        stages: PushStages,
        transport: Transport,
        members: tuple[Member, ...],
        *,
        on_served: Callable[[], None],
    ) -> PushOutcome:
        if not isinstance(transport, CollectiveTransport):
            return await RollingPush(stages, members, self._stub, on_served).run()
        outcome = await CollectivePush(stages, members, self._stub, transport).run()
        for _ in outcome.done:
            on_served()
        return outcome

    async def _answering(
        self, members: tuple[Member, ...], failed: dict[Member, PenstockError], *, lagging_behind: int | None
    ) -> tuple[Member, ...]:
        """Members that can take a push, as they report themselves: a lease may be old, or outlive its holder.

        With `lagging_behind`, only those that do not serve this version.
        """
        if not members:
            return ()
        calls = PushCalls(members, self._stub, "")
        request, timeout_s = rollout_pb2.GetReplicaRequest(), self._deadlines.control_s
        chosen = []
        try:
            answers = await calls.each(lambda stub, _: stub.GetReplica(request, timeout=timeout_s))
            for member, answer in answers.items():
                replica = answer.replica
                if replica.replica_id != member.replica_id:
                    other = f"{replica.replica_id} answers at {member.address}"
                    calls.fail(member, UnavailableError(f"{member.replica_id}: {other}; it was replaced"))
                elif replica.state in _PUSHABLE and not _is_at(lagging_behind, replica):
                    chosen.append(member)
                    self._held[member] = replica.policy_version if replica.state == _READY else 0
        except NoMembersLeftError:
            log.debug("push.no_replica_answered")
        failed |= calls.failures
        return tuple(chosen)

    async def _record_failure(self, member: Member, error: PenstockError, version: int) -> None:
        wait_s = self.failed_replicas.add(member, now=time.monotonic())
        # A replica with wrong checksums is BROKEN, and gets no requests.
        event = "replica.quarantined" if isinstance(error, ChecksumError) else "push.replica_failed"
        log.error(event, version=version, replica_id=member.replica_id, reason=str(error), retry_after_s=wait_s)
        await self._disconnect(member)

    async def _forget_the_dead(self) -> None:
        live = set(self._members(lambda _: True))
        for member in self._channels.keys() - live:
            await self._disconnect(member)
        self.failed_replicas.keep_only(live)
        self._held = {member: version for member, version in self._held.items() if member in live}
        self._selector.forget_the_dead(live)

    async def _disconnect(self, member: Member) -> None:
        channel = self._channels.pop(member, None)
        if channel is not None:
            await channel.close(None)

    def _stub(self, member: Member) -> Stub:
        if member not in self._channels:
            self._channels[member] = connect(member.address, self.security)
        return rollout_pb2_grpc.RolloutServiceStub(self._channels[member])


def _is_at(version: int | None, replica: common_pb2.Replica) -> bool:
    return replica.policy_version == version and replica.state == common_pb2.REPLICA_STATE_READY


def _member(replica: common_pb2.Replica) -> Member:
    return Member(replica.replica_id, replica.address)
