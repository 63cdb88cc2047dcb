"""WeightPublisher: brings every live replica to the published policy version, and keeps it there.

Invariants: a replica generates again only after the digest of every parameter it holds equals the trainer's; no stage
waits longer than its deadline, so a replica that dies or hangs costs one deadline and the others get their weights;
one that has failed is tried again by itself, so that it can spoil no other's push, and gives way to a publication, so
that training does not wait for its deadlines; weights are pushed from a snapshot, so that a replica which joins between
two steps gets exactly the published version.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc.aio
import structlog
import torch

from penstock.bus.leases import Watch
from penstock.bus.replica_lease import read_replica
from penstock.errors import NotReadyError, PenstockError, UnavailableError
from penstock.rpc.channel import connect
from penstock.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc
from services.trainer.config import PushConfig
from services.trainer.push.attempt import Attempt, ChecksumError
from services.trainer.push.published_weights import PublishedWeights
from services.trainer.push.snapshots import Snapshots
from services.trainer.push.stages import Member, NobodyLeftError, Stages, Stub, gathered
from services.trainer.push.ways import Ways

log = structlog.get_logger()

# UPDATING is one that a push has left behind, or one whose lease is a moment old: only one push runs at a time.
_PUSHABLE = (
    common_pb2.REPLICA_STATE_READY,
    common_pb2.REPLICA_STATE_UPDATING,
    common_pb2.REPLICA_STATE_BROKEN,
)
_READY = common_pb2.REPLICA_STATE_READY
_CATCH_UP_EVERY_S = 1.0
_MAX_DOUBLINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What a push did."""

    version: int
    num_replicas: int
    """Replicas that hold the version now because of this push."""
    num_failed: int
    """Replicas that were given up; they are tried again while they live."""
    num_bytes: int
    """Size of the weights."""
    push_s: float
    """From the first call to the last answer."""
    pause_s: float
    """From the moment when the first engine was asked to stop generating to the end of the push; 0 if none was."""
    stages_s: Mapping[str, float] = field(default_factory=dict)
    """Time of each stage, by its name, over all attempts."""


@dataclass(slots=True)
class _Failure:
    """A replica's pushes that failed, since the last that did not."""

    count: int = 0
    retry_at: float = 0.0


@dataclass(slots=True, kw_only=True)
class WeightPublisher:
    """Pushes snapshots to replicas. One push at a time."""

    config: PushConfig
    replicas: Watch
    """The `replicas` bucket."""
    backend: str
    """torch.distributed back end of the push: nccl or gloo."""
    snapshots: Snapshots
    """Written if so configured; late joiners read them."""
    _current: PublishedWeights | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _channels: dict[Member, grpc.aio.Channel] = field(default_factory=dict)
    _failures: dict[Member, _Failure] = field(default_factory=dict)
    _held: dict[Member, int] = field(default_factory=dict)
    """The version that each said it held when it was last asked; 0: none that is whole."""
    _retry: asyncio.Task[None] | None = None
    """Another try with one that has failed. It waits for the lock by itself, and may be cancelled at any time."""
    _ways: Ways = field(init=False)

    def __post_init__(self) -> None:
        """Nothing is opened yet."""
        self._ways = Ways(self.config, self.snapshots, backend=self.backend)

    def take(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> PublishedWeights:
        """A snapshot to publish, of the trainer's parameters by checkpoint name. Blocking: it reads every byte.

        Raises:
            ValueError: a name comes twice, or one tensor under two names.
        """
        return self._ways.take(version, tensors)

    async def publish(self, weights: PublishedWeights) -> PushReport:
        """Make `weights` the published version and push it to every live replica.

        Replicas that fail, or have failed before, are left out and caught up with later; that no replica is there is
        no error. Another try with one that has failed is broken off for it; a catch-up of others ends first.

        Raises:
            SetupError: this machine cannot be reached at push.host, or has no room for a delta.
        """
        await self._end_retry()
        async with self._lock:
            await self._ways.make_ready(weights)
            self._current = weights
            members = self._members(lambda replica: replica.state in _PUSHABLE)
            report = await self._push(weights, [member for member in members if member not in self._failures])
        self.snapshots.write_soon(weights)
        return report

    async def keep_current(self) -> None:
        """Until cancelled: push the published version to replicas that lack it, such as ones that have just joined.

        Raises:
            SetupError: this machine cannot be reached at push.host.
        """
        while True:
            await self.replicas.changed(_CATCH_UP_EVERY_S)
            async with self._lock:
                await self._forget_the_dead()
                fresh = [member for member in self._lagging() if member not in self._failures]
                if self._current is not None and fresh:
                    await self._push(self._current, fresh, only_lagging=True)
            for member in self._due():
                self._retry = asyncio.create_task(self._try_again(member))
                await gathered([self._retry])
                if not self._retry.cancelled():
                    self._retry.result()

    @property
    def num_live_replicas(self) -> int:
        """Replicas with a lease that have finished loading."""
        return len(self._members(lambda replica: replica.state != common_pb2.REPLICA_STATE_STARTING))

    async def close(self) -> None:
        """Leave the process group, finish the snapshot that is being written, and close all channels."""
        await self._ways.close()
        await self.snapshots.close()
        for member in tuple(self._channels):
            await self._disconnect(member)

    async def _try_again(self, member: Member) -> None:
        async with self._lock:
            if self._current is not None and member in self._lagging():
                await self._push(self._current, [member], only_lagging=True)
            else:
                self._failures.pop(member, None)  # it has the version after all, or is gone

    async def _end_retry(self) -> None:
        """Break off the try that runs, and those that follow it. They count as no failure: the replicas stay due."""
        while (retry := self._retry) is not None and not retry.done():
            retry.cancel()
            await asyncio.wait([retry])  # its replica is told, and its transport is closed
            log.info("push.retry_broken_off")

    def _lagging(self) -> list[Member]:
        """Those that lack the published version, by their leases."""
        return self._members(lambda replica: replica.state in _PUSHABLE and not self._is_current(replica))

    def _is_current(self, replica: common_pb2.Replica) -> bool:
        version = None if self._current is None else self._current.version
        return replica.policy_version == version and replica.state == common_pb2.REPLICA_STATE_READY

    def _due(self) -> list[Member]:
        now = time.monotonic()
        return [member for member, failure in self._failures.items() if failure.retry_at <= now]

    def _members(self, wanted: Callable[[common_pb2.Replica], bool]) -> list[Member]:
        replicas = [read_replica(key, value) for key, value in self.replicas.values.items()]
        chosen = [Member(one.replica_id, one.address) for one in replicas if one is not None and wanted(one)]
        return sorted(chosen, key=lambda member: member.replica_id)

    async def _push(
        self, weights: PublishedWeights, members: Sequence[Member], *, only_lagging: bool = False
    ) -> PushReport:
        """Push to `members`, leaving out those that fail. One whose checksums are wrong is pushed to once more."""
        started, paused_at = time.monotonic(), math.inf
        failed: dict[Member, PenstockError] = {}
        done: list[Member] = []
        stages_s: dict[str, float] = {}
        repeated: set[Member] = set()
        failed_delta: set[Member] = set()
        left = await self._answering(tuple(members), failed, only_lagging=only_lagging)
        while left:
            part, transport = await self._ways.next(
                left, weights, held=self._held, failed_delta=failed_delta, only_lagging=only_lagging
            )
            outcome = await Attempt(weights, part, stub=self._stub, config=self.config, transport=transport).run()
            await self._ways.keep(transport, outcome)
            done += outcome.done
            paused_at = min(paused_at, outcome.paused_at)
            for stage, seconds in outcome.stages_s.items():
                stages_s[stage] = stages_s.get(stage, 0.0) + seconds
            left = tuple(member for member in left if member not in outcome.done and member not in outcome.failed)
            for member, error in outcome.failed.items():
                has_another = self._ways.note_failure(transport, member, error, stage=outcome.failed_in[member])
                failed_delta.add(member)
                if has_another and isinstance(error, NotReadyError):
                    log.info("push.falls_back", replica_id=member.replica_id, way=transport.kind, reason=str(error))
                elif isinstance(error, ChecksumError) and member not in repeated:
                    log.warning("push.repeated", replica_id=member.replica_id, reason=str(error))
                    repeated.add(member)
                else:
                    failed[member] = error
                    continue
                left = (*left, member)
            left = tuple(sorted(left, key=lambda member: member.replica_id))
        ended = time.monotonic()
        for member in done:
            self._failures.pop(member, None)
        for member, error in failed.items():
            await self._take_note(member, error, weights.version)
        report = PushReport(
            version=weights.version,
            num_replicas=len(done),
            num_failed=len(failed),
            num_bytes=weights.manifest.num_bytes,
            push_s=ended - started,
            pause_s=max(0.0, ended - paused_at),
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

    async def _answering(
        self, members: tuple[Member, ...], failed: dict[Member, PenstockError], *, only_lagging: bool
    ) -> tuple[Member, ...]:
        """Those that can take a push, by what they say themselves: a lease outlives its holder, and lags behind it."""
        if not members:
            return ()
        stages = Stages(members, self._stub, "")
        request, timeout_s = rollout_pb2.GetReplicaRequest(), self.config.control_timeout_s
        chosen = []
        try:
            answers = await stages.each(lambda stub, _: stub.GetReplica(request, timeout=timeout_s))
            for member, answer in answers.items():
                replica = answer.replica
                if replica.replica_id != member.replica_id:
                    other = f"{replica.replica_id} answers at {member.address}"
                    stages.fail(member, UnavailableError(f"{member.replica_id}: {other}; it was replaced"))
                elif replica.state in _PUSHABLE and not (only_lagging and self._is_current(replica)):
                    chosen.append(member)
                    self._held[member] = replica.policy_version if replica.state == _READY else 0
        except NobodyLeftError:
            log.debug("push.nobody_answered")
        failed |= stages.failures
        return tuple(chosen)

    async def _take_note(self, member: Member, error: PenstockError, version: int) -> None:
        failure = self._failures.setdefault(member, _Failure())
        wait_s = self.config.retry_after_s * 2 ** min(failure.count, _MAX_DOUBLINGS)
        failure.count += 1
        failure.retry_at = time.monotonic() + wait_s
        # A replica whose checksums are wrong says BROKEN by itself, and gets no requests.
        event = "replica.quarantined" if isinstance(error, ChecksumError) else "push.replica_failed"
        log.error(event, version=version, replica_id=member.replica_id, reason=str(error), retry_after_s=wait_s)
        await self._disconnect(member)

    async def _forget_the_dead(self) -> None:
        live = set(self._members(lambda _: True))
        for member in self._channels.keys() - live:
            await self._disconnect(member)
        self._failures = {member: failure for member, failure in self._failures.items() if member in live}
        self._held = {member: version for member, version in self._held.items() if member in live}
        self._ways.forget_the_dead(live)

    async def _disconnect(self, member: Member) -> None:
        channel = self._channels.pop(member, None)
        if channel is not None:
            await channel.close(None)

    def _stub(self, member: Member) -> Stub:
        if member not in self._channels:
            self._channels[member] = connect(member.address)
        return rollout_pb2_grpc.RolloutServiceStub(self._channels[member])
