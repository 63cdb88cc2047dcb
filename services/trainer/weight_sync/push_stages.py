"""The stages of a push, as calls to one member: prepare, upload, pause, transfer, verify, commit.

Every call has a deadline. `rolling_push.py` takes each member through the stages alone, `collective_push.py` all of
them together until they have received the weights.
"""

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from penstock.errors import PenstockError
from penstock.telemetry import spans
from penstock.v1 import rollout_pb2
from services.trainer.config import WeightSyncConfig
from services.trainer.weight_sync.deadlines import PushDeadlines
from services.trainer.weight_sync.push_calls import Member, Stub, called
from services.trainer.weight_sync.snapshot import WeightSnapshot
from services.trainer.weight_sync.transports.base import PullTransport, Transport

_DRAIN_S = 30.0
"""With mode drain, seconds for running requests to finish; after that they are retracted. New ones wait meanwhile, so
this bounds the cost of a push. With longer answers, retract is the better mode."""
_MODES = {
    "retract": rollout_pb2.PAUSE_MODE_RETRACT,
    "in_place": rollout_pb2.PAUSE_MODE_IN_PLACE,
    "drain": rollout_pb2.PAUSE_MODE_DRAIN,
}


class ChecksumError(PenstockError):
    """A replica does not hold the bytes that were sent."""


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
        self._transport = transport
        self._config = config
        self._replaces_newer = replaces_newer
        self._manifest = weights.manifest.to_proto()

    @property
    def mean_s(self) -> dict[str, float]:
        """Mean of `durations_s` by stage."""
        return {stage: sum(each) / len(each) for stage, each in self.durations_s.items()}

    async def take(self, member: Member, stages: Sequence[str], stub: Callable[[Member], Stub]) -> None:
        """Take `member` through `stages`, named like the methods below, one after the other until one fails."""
        for stage in stages:
            self.reached[member] = stage
            start: Callable[[Stub, Member], Awaitable[object]] = getattr(self, stage)
            began = time.monotonic()
            error: BaseException | None = None
            try:
                await called(start(stub(member), member), peer=member.replica_id)
            except BaseException as failure:
                error = failure
                raise
            finally:
                ended = time.monotonic()
                self.durations_s[stage].append(ended - began)
                self.record(stage, member, began, ended, error)

    def prepare(self, stub: Stub, member: Member) -> Awaitable[rollout_pb2.PrepareWeightsResponse]:
        """Announce the push."""
        request = rollout_pb2.PrepareWeightsRequest(
            push_id=self.push_id,
            policy_version=self.weights.version,
            manifest=self._manifest,
            digest=self.weights.digest_kind,
            deadline_s=self.deadlines.push_s,
            replaces_newer=self._replaces_newer,
        )
        self._transport.announce(member, request)
        return stub.PrepareWeights(request, timeout=self.deadlines.prepare_s)

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
            error=None if error is None else str(error),
        )

    async def upload(self, stub: Stub, _: Member) -> None:
        """Send the bytes that the member loads later, while it still generates."""
        if isinstance(self._transport, PullTransport):
            await self._transport.upload(stub, self.push_id, timeout_s=self.deadlines.upload_s)

    def pause(self, stub: Stub, _: Member) -> Awaitable[rollout_pb2.PauseGenerationResponse]:
        """Make the member stop generating."""
        drain_s = _DRAIN_S if self._config.mode == "drain" else 0.0
        request = rollout_pb2.PauseGenerationRequest(
            push_id=self.push_id, mode=_MODES[self._config.mode], drain_s=drain_s
        )
        return stub.PauseGeneration(request, timeout=self.deadlines.pause_s + drain_s)

    def transfer(self, stub: Stub, _: Member) -> Awaitable[rollout_pb2.ReceiveWeightsResponse]:
        """Make the member load the weights."""
        request = rollout_pb2.ReceiveWeightsRequest(push_id=self.push_id)
        return stub.ReceiveWeights(request, timeout=self.deadlines.transfer_s)

    async def verify(self, stub: Stub, member: Member) -> None:
        """Compare the digest of every parameter that the member holds with the snapshot's.

        Raises:
            ChecksumError: some digests differ.
        """
        request = rollout_pb2.VerifyWeightsRequest(push_id=self.push_id)
        answer = await stub.VerifyWeights(request, timeout=self.deadlines.verify_s)
        if differing := await asyncio.to_thread(self.weights.differing_names, answer.digests):
            names = f"{len(differing)} parameters: {differing[:4]}"
            message = f"{member.replica_id}: weights differ after the push in {names}"
            if any(name in self.weights.base_digests for name in differing):
                message += (
                    "; only adapters are pushed, so the engine must have been started from the trainer's model.path, "
                    "in its precision: set rollout.dtype and trainer.dtype alike, and start it again"
                )
            raise ChecksumError(message)

    def commit(self, stub: Stub, _: Member) -> Awaitable[rollout_pb2.CommitWeightsResponse]:
        """Make the member adopt the version and generate with it."""
        request = rollout_pb2.CommitWeightsRequest(push_id=self.push_id)
        return stub.CommitWeights(request, timeout=self.deadlines.control_s)
