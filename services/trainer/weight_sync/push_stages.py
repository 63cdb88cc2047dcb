"""The stages of a push to one member: prepare, upload, pause, transfer, commit, each with a deadline.

`rolling_push.py` takes each member through the stages alone, in one call unless it is sent the weights first;
`collective_push.py` takes all of them together until they have received the weights.
"""

import asyncio
import functools
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable
from typing import Any

import grpc.aio

from penstock.errors import DeadlineError, PenstockError
from penstock.rpc.addressee import addressed_to
from penstock.telemetry import spans
from penstock.v1 import rollout_pb2
from services.trainer.config import WeightSyncConfig
from services.trainer.weight_sync.deadlines import PushDeadlines
from services.trainer.weight_sync.push_calls import Member, Stub, called
from services.trainer.weight_sync.snapshot import WeightSnapshot
from services.trainer.weight_sync.transports.base import PullTransport, Transport, UploadTransport

_DRAIN_S = 30.0
"""With mode drain, seconds for running requests to finish; after that they are retracted. New ones wait meanwhile, so
this bounds the cost of a push. With longer answers, retract is the better mode."""
_MODES = {
    "retract": rollout_pb2.PAUSE_MODE_RETRACT,
    "in_place": rollout_pb2.PAUSE_MODE_IN_PLACE,
    "drain": rollout_pb2.PAUSE_MODE_DRAIN,
}

_SETTINGS = {
    "prepare": "stage_timeout_s",
    "upload": "transfer_timeout_s",
    "pause": "stage_timeout_s",
    "transfer": "transfer_timeout_s",
    "commit": "transfer_timeout_s",
}
"""What sets the deadline of each stage."""


class PushStages:
    """The calls of one push."""

    def __init__(
        self,
        weights: WeightSnapshot,
        transport: Transport,
        *,
        config: WeightSyncConfig,
        deadlines: PushDeadlines,
        replaces_newer: bool = False,
    ) -> None:
        """Push `weights` over `transport`, which must have been opened for the members.

        With `replaces_newer` the weights may be older than those that members hold; members reject that otherwise.
        """
        self.weights = weights
        self.deadlines = deadlines
        self.push_id = f"v{weights.version}-{uuid.uuid4().hex[:8]}"
        self.reached: dict[Member, str] = {}
        """The last stage that each member taken through stages alone has begun."""
        self.durations_s: defaultdict[str, list[float]] = defaultdict(list)
        """Seconds that each of these members spent in a stage, by the stage's name."""
        self.paused_s: dict[Member, float] = {}
        """Seconds that each of these members was kept from generating."""
        self.absent: set[Member] = set()
        """Members whose only call failed before it was prepared: there is nothing to abort."""
        self._transport = transport
        self._mode = _MODES[config.mode]
        self._drain_s = _DRAIN_S if config.mode == "drain" else 0.0
        self._replaces_newer = replaces_newer

    @property
    def mean_s(self) -> dict[str, float]:
        """Mean of `durations_s` by stage."""
        return {stage: sum(each) / len(each) for stage, each in self.durations_s.items()}

    async def run(self, stage: str, member: Member, work: Awaitable[object]) -> None:
        """Take `member` through a stage: await `work`, whose failure becomes an error of `penstock.errors`."""
        self.reached[member] = stage
        began = time.monotonic()
        error: BaseException | None = None
        try:
            await called(work, peer=member.replica_id)
        except TimeoutError:
            setting = f"trainer.weight_sync.{_SETTINGS[stage]}"
            error = DeadlineError(f"{member.replica_id}: stage {stage} exceeded its deadline; see {setting}")
            raise error from None
        except BaseException as failure:
            error = failure
            raise
        finally:
            ended = time.monotonic()
            self.durations_s[stage].append(ended - began)
            self.record(stage, member, began, ended, error)

    def prepare(self, stub: Stub, member: Member) -> Awaitable[rollout_pb2.PrepareWeightsResponse]:
        """Announce the push."""
        announcement = rollout_pb2.PrepareWeightsRequest()
        announcement.CopyFrom(self._announcement)
        self._transport.announce(member, announcement)
        return stub.PrepareWeights(
            announcement, timeout=self.deadlines.prepare_s, metadata=addressed_to(member.replica_id)
        )

    def record(
        self, stage: str, member: Member, began: float, ended: float, error: BaseException | None = None
    ) -> None:
        """Record the span of a stage of the push to `member`, by times of `time.monotonic()`."""
        spans.record(
            "push.stage",
            began,
            ended,
            stage=stage,
            replica=member.replica_id,
            version=self.weights.version,
            push=self.push_id,
            **({} if error is None else {"error": str(error)}),
        )

    async def take_alone(self, stub: Stub, member: Member) -> None:
        """Take the member through all stages."""
        transport, deadlines = self._transport, self.deadlines
        if isinstance(transport, UploadTransport):
            await self.run("prepare", member, self.prepare(stub, member))
            await self.run("upload", member, transport.upload(stub, self.push_id, timeout_s=deadlines.upload_s))
            call = stub.UpdateWeights(self._update)
        else:
            call = stub.UpdateWeights(self._announced_update, metadata=addressed_to(member.replica_id))
            try:
                await self.run("prepare", member, _answered(call, within_s=deadlines.prepare_s))
            except PenstockError:
                self.absent.add(member)
                raise
        paused_at = time.monotonic()
        try:
            await self.run("pause", member, _answered(call, within_s=deadlines.pause_s + self._drain_s))
            await self.run("transfer", member, _answered(call, within_s=deadlines.transfer_s))
            await self.run("commit", member, _ended(call, within_s=deadlines.commit_s))
        finally:
            self.paused_s[member] = time.monotonic() - paused_at

    def pause(self, stub: Stub, _: Member) -> Awaitable[rollout_pb2.PauseGenerationResponse]:
        """Make the member stop generating."""
        request = rollout_pb2.PauseGenerationRequest(push_id=self.push_id, mode=self._mode, drain_s=self._drain_s)
        return stub.PauseGeneration(request, timeout=self.deadlines.pause_s + self._drain_s)

    def transfer(self, stub: Stub, _: Member) -> Awaitable[rollout_pb2.ReceiveWeightsResponse]:
        """Make the member load the weights."""
        request = rollout_pb2.ReceiveWeightsRequest(push_id=self.push_id)
        return stub.ReceiveWeights(request, timeout=self.deadlines.transfer_s)

    def commit(self, stub: Stub, _: Member) -> Awaitable[rollout_pb2.CommitWeightsResponse]:
        """Make the member prove the weights, adopt the version and generate with it.

        Raises:
            ChecksumError: it holds others.
        """
        return stub.CommitWeights(self._commit, timeout=self.deadlines.commit_s)

    # A large model has tens of thousands of weights, so these messages are made once for all members.
    @functools.cached_property
    def _announcement(self) -> rollout_pb2.PrepareWeightsRequest:
        """Without a source."""
        return rollout_pb2.PrepareWeightsRequest(
            push_id=self.push_id,
            policy_version=self.weights.version,
            manifest=self.weights.manifest.to_proto(),
            digest=self.weights.digest_kind,
            deadline_s=self.deadlines.push_s,
            replaces_newer=self._replaces_newer,
        )

    @functools.cached_property
    def _announced_update(self) -> rollout_pb2.UpdateWeightsRequest:
        """With the source of a transport that members read, which is the same for all."""
        assert isinstance(self._transport, PullTransport), "others announce something different to each member"
        request = rollout_pb2.UpdateWeightsRequest()
        request.CopyFrom(self._update)
        request.prepare.CopyFrom(self._announcement)
        self._transport.name_source(request.prepare)
        return request

    @functools.cached_property
    def _update(self) -> rollout_pb2.UpdateWeightsRequest:
        return rollout_pb2.UpdateWeightsRequest(
            push_id=self.push_id, mode=self._mode, drain_s=self._drain_s, digests=self.weights.proof
        )

    @functools.cached_property
    def _commit(self) -> rollout_pb2.CommitWeightsRequest:
        return rollout_pb2.CommitWeightsRequest(push_id=self.push_id, digests=self.weights.proof)


async def _answered(call: "grpc.aio.UnaryStreamCall[Any, Any]", *, within_s: float) -> bool:
    """Wait for the next answer; return whether there is one, or the call has ended without an error.

    Raises:
        TimeoutError: it takes longer than `within_s` seconds; the call is cancelled.
    """
    async with asyncio.timeout(within_s):
        return await call.read() is not grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it


async def _ended(call: "grpc.aio.UnaryStreamCall[Any, Any]", *, within_s: float) -> None:
    """Wait until the call ends without an error, for at most `within_s` seconds for each answer."""
    while await _answered(call, within_s=within_s):
        pass
