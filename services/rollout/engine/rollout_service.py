"""The engine's gRPC control service: weight pushes and draining."""

import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from penstock.errors import InvalidRequestError
from penstock.rpc.addressee import require_addressee
from penstock.v1 import rollout_pb2, rollout_pb2_grpc
from penstock.weights.manifest import Manifest
from services.rollout.engine.drain import Drain
from services.rollout.engine.replica_view import ReplicaView
from services.rollout.engine.weight_sync.weight_receiver import WeightReceiver

Context = grpc.aio.ServicerContext[Any, Any]


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Receives pushes and orders to drain."""

    def __init__(self, receiver: WeightReceiver, view: ReplicaView, drain: Drain) -> None:
        """Hand pushes to `receiver`; `view` describes the replica, `drain` drains it."""
        self._receiver = receiver
        self._view = view
        self._drain = drain

    async def GetReplica(  # noqa: N802 - the contract's name
        self, request: rollout_pb2.GetReplicaRequest, context: Context
    ) -> rollout_pb2.GetReplicaResponse:
        """Return what the lease announces."""
        await self._view.refresh()
        return rollout_pb2.GetReplicaResponse(replica=self._view.describe())

    async def PrepareWeights(  # noqa: N802 - the contract's name
        self, request: rollout_pb2.PrepareWeightsRequest, context: Context
    ) -> rollout_pb2.PrepareWeightsResponse:
        """Announce a push: join its process group, or check its source."""
        await self._prepare(request, context)
        return rollout_pb2.PrepareWeightsResponse()

    async def SendWeights(  # noqa: N802 - the contract's name
        self, request_iterator: AsyncIterator[rollout_pb2.SendWeightsRequest], context: Context
    ) -> rollout_pb2.SendWeightsResponse:
        """Store the blocks of a delta."""
        first = await anext(aiter(request_iterator), None)
        if first is None:
            raise InvalidRequestError("push_id is missing: the first part must name the push, and the call was empty")
        return rollout_pb2.SendWeightsResponse(size_bytes=await self._receiver.upload(first.push_id, request_iterator))

    async def PauseGeneration(  # noqa: N802 - the contract's name
        self, request: rollout_pb2.PauseGenerationRequest, context: Context
    ) -> rollout_pb2.PauseGenerationResponse:
        """Stop generation."""
        await self._receiver.pause(request.push_id, request.mode, request.drain_s)
        return rollout_pb2.PauseGenerationResponse()

    async def ReceiveWeights(  # noqa: N802 - the contract's name
        self, request: rollout_pb2.ReceiveWeightsRequest, context: Context
    ) -> rollout_pb2.ReceiveWeightsResponse:
        """Take all buckets."""
        await self._receiver.receive(request.push_id)
        return rollout_pb2.ReceiveWeightsResponse()

    async def CommitWeights(  # noqa: N802 - the contract's name
        self, request: rollout_pb2.CommitWeightsRequest, context: Context
    ) -> rollout_pb2.CommitWeightsResponse:
        """Prove the weights, make the version current and resume generation."""
        await self._receiver.verify(request.push_id, request.digests)
        await self._receiver.commit(request.push_id)
        return rollout_pb2.CommitWeightsResponse()

    async def UpdateWeights(  # noqa: N802 - the contract's name
        self, request: rollout_pb2.UpdateWeightsRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.UpdateWeightsResponse]:
        """Pause, take all buckets, prove them, make the version current and resume generation; announce the push before
        that if the request does."""
        announced = None
        if request.HasField("prepare"):
            _require_one_call(request)
            announced = self._prepare(request.prepare, context)
        async with aclosing(
            self._receiver.update(request.push_id, request.mode, request.drain_s, request.digests, announced=announced)
        ) as stages:
            async for stage in stages:
                yield rollout_pb2.UpdateWeightsResponse(stage=stage)

    async def AbortWeights(  # noqa: N802 - the contract's name
        self, request: rollout_pb2.AbortWeightsRequest, context: Context
    ) -> rollout_pb2.AbortWeightsResponse:
        """End a push that cannot be completed."""
        return rollout_pb2.AbortWeightsResponse(state=await self._receiver.abort(request.push_id, request.reason))

    async def DrainReplica(  # noqa: N802 - the contract's name
        self, request: rollout_pb2.DrainReplicaRequest, context: Context
    ) -> rollout_pb2.DrainReplicaResponse:
        """Take no new calls, and return when none is running."""
        if not (math.isfinite(request.grace_s) and request.grace_s >= 0):
            raise InvalidRequestError(f"grace_s = {request.grace_s} must be 0 (hand over at once) or greater")
        drained = await self._drain.run(request.grace_s)
        return rollout_pb2.DrainReplicaResponse(
            num_finished=drained.num_finished, num_handed_over=drained.num_handed_over
        )

    async def _prepare(self, request: rollout_pb2.PrepareWeightsRequest, context: Context) -> None:
        require_addressee(context, self._view.replica_id)
        field = request.WhichOneof("source")
        if field is None:
            raise InvalidRequestError("source is missing: give one of broadcast, disk, shared_memory and delta")
        await self._receiver.prepare(
            request.push_id,
            request.policy_version,
            getattr(request, field),
            Manifest.from_proto(request.manifest),
            deadline_s=request.deadline_s,
            digest=request.digest,
            replaces_newer=request.replaces_newer,
        )


def _require_one_call(request: rollout_pb2.UpdateWeightsRequest) -> None:
    """Check that the push that is announced is the one that is taken, and can be taken in the same call.

    Raises:
        InvalidRequestError: it is another, or it needs an upload before.
    """
    if request.prepare.push_id != request.push_id:
        raise InvalidRequestError(
            f"prepare.push_id = {request.prepare.push_id!r} is not push_id = {request.push_id!r}; announce the push "
            "that is taken"
        )
    if request.prepare.HasField("delta"):
        raise InvalidRequestError("prepare.delta: a delta is uploaded first; announce it with PrepareWeights")
