"""WeightPublisher: brings every live replica to the published policy version, and keeps it there.

Invariants: a replica generates again only after the digest of every parameter it holds equals the trainer's; no stage
waits longer than its deadline, so a replica that dies costs one deadline and the others get their weights; weights are
pushed from a snapshot, so that a replica which joins between two steps gets exactly the published version.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio
import structlog
from google.protobuf import json_format

from penstock.bus.leases import Watch
from penstock.errors import PenstockError
from penstock.rpc.channel import connect
from penstock.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc
from services.trainer.config import PushConfig
from services.trainer.push.published_weights import PublishedWeights
from services.trainer.push.stages import Member, MembersFailedError, Stages
from services.trainer.push.weight_group import WeightGroup

log = structlog.get_logger()

_PUSHABLE = (common_pb2.REPLICA_STATE_READY, common_pb2.REPLICA_STATE_BROKEN)
_CATCH_UP_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What a push did."""

    version: int
    num_replicas: int
    """Replicas that hold the version now because of this push."""
    num_failed: int
    """Replicas that were given up; they are tried again while they live."""
    num_bytes: int
    push_s: float
    """From the first call to the last answer."""
    pause_s: float
    """Time in which the engines did not generate."""


@dataclass(frozen=True, slots=True)
class _Epoch:
    """The process group that a set of replicas forms with the trainer."""

    members: tuple[Member, ...]
    message: rollout_pb2.WeightGroup
    group: WeightGroup


@dataclass(slots=True, kw_only=True)
class WeightPublisher:
    """Pushes snapshots to replicas. One push at a time."""

    config: PushConfig
    replicas: Watch
    """The `replicas` bucket."""
    backend: str
    """torch.distributed back end of the push: nccl or gloo."""
    _current: PublishedWeights | None = None
    _epoch: _Epoch | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)
    _retry_at: dict[str, float] = field(default_factory=dict)

    async def publish(self, weights: PublishedWeights) -> PushReport:
        """Make `weights` the published version and push it to every live replica.

        Replicas that fail are left out and caught up with later; that no replica is there is no error.
        """
        async with self._lock:
            self._current = weights
            return await self._push(weights, self._members(lambda replica: replica.state in _PUSHABLE))

    async def keep_current(self) -> None:
        """Until cancelled: push the published version to replicas that lack it, such as ones that have just joined."""
        while True:
            await self.replicas.changed(_CATCH_UP_EVERY_S)
            async with self._lock:
                if self._current is not None and (members := self._lagging(self._current.version)):
                    await self._push(self._current, members)

    @property
    def num_live_replicas(self) -> int:
        """Replicas with a lease that have finished loading."""
        return len(self._members(lambda replica: replica.state != common_pb2.REPLICA_STATE_STARTING))

    async def close(self) -> None:
        """Leave the process group and close all channels."""
        await self._end_epoch()
        for channel in self._channels.values():
            await channel.close(None)

    def _lagging(self, version: int) -> list[Member]:
        now = time.monotonic()
        return self._members(
            lambda replica: (
                replica.state in _PUSHABLE
                and (replica.policy_version != version or replica.state == common_pb2.REPLICA_STATE_BROKEN)
                and self._retry_at.get(replica.replica_id, 0.0) <= now
            )
        )

    def _members(self, wanted: Callable[[common_pb2.Replica], bool]) -> list[Member]:
        replicas = [json_format.Parse(value, common_pb2.Replica()) for value in self.replicas.values.values()]
        chosen = [Member(replica.replica_id, replica.address) for replica in replicas if wanted(replica)]
        return sorted(chosen, key=lambda member: member.replica_id)

    async def _push(self, weights: PublishedWeights, members: Sequence[Member]) -> PushReport:
        """Push to `members`, leaving out those that fail."""
        started, failed, pause_s = time.monotonic(), set[Member](), 0.0
        left = tuple(members)
        while left:
            try:
                pause_s = await self._push_once(weights, left)
                break
            except MembersFailedError as error:
                log.error("push.member_failed", version=weights.version, reason=str(error))
                failed |= error.members
                left = tuple(member for member in left if member not in error.members)
                await self._end_epoch()
        for member in failed:
            self._retry_at[member.replica_id] = time.monotonic() + self.config.retry_after_s
        report = PushReport(
            version=weights.version,
            num_replicas=len(left),
            num_failed=len(failed),
            num_bytes=weights.manifest.num_bytes,
            push_s=time.monotonic() - started,
            pause_s=pause_s,
        )
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

    async def _push_once(self, weights: PublishedWeights, members: tuple[Member, ...]) -> float:
        """All stages with all members; the seconds for which generation was paused.

        Raises:
            MembersFailedError: naming those that failed; all members were told to abort.
        """
        push_id = f"v{weights.version}-{uuid.uuid4().hex[:8]}"
        each = Stages(members, self._stub, push_id)
        try:
            await self._prepare(each, weights)
            paused = time.monotonic()
            await each.each_of_push("PauseGeneration", rollout_pb2.PauseGenerationRequest, self.config.pause_timeout_s)
            await self._transfer(each, weights)
            await self._verify(each, weights)
            await each.each_of_push("CommitWeights", rollout_pb2.CommitWeightsRequest, self.config.control_timeout_s)
            await each.each_of_push(
                "ResumeGeneration", rollout_pb2.ResumeGenerationRequest, self.config.control_timeout_s
            )
        except MembersFailedError as error:
            await each.abort(str(error), self.config.control_timeout_s)
            raise
        return time.monotonic() - paused

    async def _prepare(self, each: Stages, weights: PublishedWeights) -> None:
        # A replica that was killed a moment ago refuses this at once; in the rendezvous it would cost the deadline.
        timeout_s = self.config.control_timeout_s
        await each.each(lambda stub, _: stub.GetReplica(rollout_pb2.GetReplicaRequest(), timeout=timeout_s))
        opening: asyncio.Future[WeightGroup] | None = None
        if self._epoch is None or self._epoch.members != each.members:
            await self._end_epoch()
            message = rollout_pb2.WeightGroup(
                name=f"epoch-{uuid.uuid4().hex[:12]}",
                master_host=self.config.host,
                master_port=WeightGroup.free_port(self.config.host),
                world_size=1 + len(each.members),
                backend=self.backend,
            )
            opening = asyncio.ensure_future(asyncio.to_thread(self._open_group, message))
        else:
            message = self._epoch.message
        manifest = weights.manifest.to_proto()
        ranks = {member: rank for rank, member in enumerate(each.members, start=1)}

        def prepare(
            stub: "rollout_pb2_grpc.RolloutServiceAsyncStub", member: Member
        ) -> Awaitable[rollout_pb2.PrepareWeightsResponse]:
            own = rollout_pb2.WeightGroup()
            own.CopyFrom(message)
            own.rank_offset = ranks[member]
            request = rollout_pb2.PrepareWeightsRequest(
                push_id=each.push_id, policy_version=weights.version, group=own, manifest=manifest
            )
            return stub.PrepareWeights(request, timeout=self.config.prepare_timeout_s)

        try:
            await each.each(prepare)
        except MembersFailedError:
            if opening is not None:
                await self._discard(opening)
            raise
        if opening is not None:
            try:
                self._epoch = _Epoch(each.members, message, await opening)
            except (PenstockError, TimeoutError, RuntimeError, OSError) as error:
                reason = f"the group did not form: {error}"
                raise MembersFailedError(dict.fromkeys(each.members, reason)) from None

    def _open_group(self, message: rollout_pb2.WeightGroup) -> WeightGroup:
        return WeightGroup.open(
            host=message.master_host,
            port=message.master_port,
            world_size=message.world_size,
            name=message.name,
            backend=message.backend,
            timeout_s=self.config.prepare_timeout_s,
        )

    async def _discard(self, opening: "asyncio.Future[WeightGroup]") -> None:
        """Let a rendezvous that cannot succeed run into its own deadline, and close what comes of it."""
        try:
            group = await opening
        except (PenstockError, TimeoutError, RuntimeError, OSError) as error:
            log.debug("push.rendezvous_failed", reason=str(error))
        else:
            await asyncio.to_thread(group.close)

    async def _transfer(self, each: Stages, weights: PublishedWeights) -> None:
        assert self._epoch is not None
        group, timeout_s = self._epoch.group, self.config.transfer_timeout_s

        def broadcast() -> None:
            for bucket in weights.buckets:
                group.broadcast(bucket, timeout_s=timeout_s)

        sending = asyncio.ensure_future(asyncio.to_thread(broadcast))
        request = rollout_pb2.ReceiveWeightsRequest(push_id=each.push_id)
        try:
            await each.each(lambda stub, _: stub.ReceiveWeights(request, timeout=timeout_s))
            await sending
        except MembersFailedError:
            await asyncio.to_thread(group.close)  # ends the broadcast, and with it the wait of the other members
            await asyncio.gather(sending, return_exceptions=True)
            raise
        except (PenstockError, TimeoutError, RuntimeError, OSError) as error:
            # Every member says it has all buckets, yet the sender failed: trust neither.
            reason = f"broadcast failed: {error}"
            raise MembersFailedError(dict.fromkeys(each.members, reason)) from None

    async def _verify(self, each: Stages, weights: PublishedWeights) -> None:
        request = rollout_pb2.VerifyWeightsRequest(push_id=each.push_id)
        timeout_s = self.config.verify_timeout_s
        answers = await each.each(lambda stub, _: stub.VerifyWeights(request, timeout=timeout_s))
        failures = {}
        for member, answer in answers.items():
            differing = weights.differing_names(answer.digests)
            if differing:
                failures[member] = f"weights differ after the push in {len(differing)} parameters: {differing[:4]}"
        if failures:
            raise MembersFailedError(failures)

    async def _end_epoch(self) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            await asyncio.to_thread(epoch.group.close)

    def _stub(self, member: Member) -> "rollout_pb2_grpc.RolloutServiceAsyncStub":
        if member.address not in self._channels:
            self._channels[member.address] = connect(member.address)
        return rollout_pb2_grpc.RolloutServiceStub(self._channels[member.address])
