"""The engine's two gRPC services: generation, and its control side."""

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc.aio

from penstock.errors import InvalidRequestError, NotReadyError, OverloadedError, UnavailableError
from penstock.rpc.server import deadline_s
from penstock.v1 import common_pb2, generate_pb2, generate_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from penstock.weights.manifest import Manifest
from services.rollout.engine import disaggregation
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.drain import Drain
from services.rollout.engine.generation import Generation
from services.rollout.engine.image_source import ImageSource
from services.rollout.engine.prompt import Turn
from services.rollout.engine.sglang_engine import Load, SglangEngine
from services.rollout.engine.weight_sync.weight_receiver import WeightReceiver

Context = grpc.aio.ServicerContext[Any, Any]

_FINISH_REASONS = {
    True: generate_pb2.FINISH_REASON_STOP,
    False: generate_pb2.FINISH_REASON_LENGTH,
    None: generate_pb2.FINISH_REASON_UNSPECIFIED,
}


class ReplicaView:
    """This engine, as its lease tells others."""

    def __init__(self, config: RolloutConfig, engine: SglangEngine, receiver: WeightReceiver) -> None:
        """A view of `engine` and `receiver`; it is complete when it `listens`."""
        self.replica_id = f"engine-{uuid.uuid4().hex[:12]}"
        self.address = ""
        self._disaggregation: common_pb2.Disaggregation | None = None
        self.draining = False
        self._config = config
        self._engine = engine
        self._receiver = receiver
        self._load = Load(num_running=0, num_queued=0, kv_use=0.0)

    def listens(self, host: str, port: int) -> None:
        """The server listens; `host` is where others reach this machine."""
        self.address = f"{host}:{port}"
        self._disaggregation = disaggregation.describe(
            self._config, host=host, bootstrap_port=self._engine.bootstrap_port
        )

    async def refresh(self) -> None:
        """Take note of the engine's load."""
        self._load = await self._engine.load()

    @property
    def state(self) -> common_pb2.ReplicaState.ValueType:
        """Where the engine is in its life."""
        return common_pb2.REPLICA_STATE_DRAINING if self.draining else self._receiver.state

    def describe(self) -> common_pb2.Replica:
        """The replica as it is now."""
        num_running = self._load.num_running
        if self._engine.is_disaggregated:
            # Those whose KV is on its way, which SGLang counts as waiting, are being worked on.
            num_running = min(self._engine.num_in_flight, self._config.max_running)
        return common_pb2.Replica(
            replica_id=self.replica_id,
            address=self.address,
            role=disaggregation.ROLES[self._config.role],
            state=self.state,
            policy_version=self._receiver.version,
            num_running=num_running,
            num_queued=max(0, self._engine.num_in_flight - num_running),
            max_running=self._config.max_running,
            kv_use=self._load.kv_use,
            disaggregation=self._disaggregation,
            max_tokens=self._engine.checker.max_tokens,
        )


class GenerateServicer(generate_pb2_grpc.GenerateServiceServicer):
    """Plays turns."""

    def __init__(
        self,
        config: RolloutConfig,
        engine: SglangEngine,
        receiver: WeightReceiver,
        view: ReplicaView,
        images: ImageSource,
    ) -> None:
        """Generate with `engine`, while `receiver` holds sound weights; `images` finds images named by hash."""
        self._config = config
        self._images = images
        self._engine = engine
        self._receiver = receiver
        self._view = view
        self._num_calls = 0

    async def Generate(self, request: generate_pb2.GenerateRequest, context: Context) -> generate_pb2.GenerateResponse:  # noqa: N802 - the contract's name
        """Play one turn."""
        with self._admitted(request):
            async with asyncio.timeout(deadline_s(context, default=self._config.request_deadline_s)):
                turn = await self._check(request)
                return self._respond(await self._engine.generate(turn))

    async def GenerateStream(  # noqa: N802 - the contract's name
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        """Play one turn and tell of its tokens as they come."""
        if request.chunk_tokens < 0:
            raise InvalidRequestError(f"chunk_tokens = {request.chunk_tokens} must be 0 (every token) or greater")
        remaining_s = deadline_s(context, default=self._config.request_deadline_s)
        deadline = asyncio.get_running_loop().time() + remaining_s
        with self._admitted(request):
            async with asyncio.timeout_at(deadline):
                turn = await self._check(request)
            async with aclosing(self._engine.stream(turn, chunk_tokens=request.chunk_tokens)) as parts:
                while True:
                    # Not around the loop: a deadline that passes while a chunk is written must not end the writer.
                    async with asyncio.timeout_at(deadline):
                        part = await anext(parts, None)
                    if part is None:
                        return
                    yield self._chunk(part)

    @contextmanager
    def _admitted(self, request: generate_pb2.GenerateRequest) -> Iterator[None]:
        self._admit(request)
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    def _admit(self, request: generate_pb2.GenerateRequest) -> None:
        self._require_serving()
        if request.min_policy_version > self._receiver.version:
            raise NotReadyError(
                f"min_policy_version = {request.min_policy_version}, but this engine serves version "
                f"{self._receiver.version}; ask another replica, or wait for its next push"
            )
        limit = self._config.max_running + self._config.max_queued
        if self._num_calls >= limit:
            raise OverloadedError(
                f"{limit} requests are in the engine already (rollout.max_running + rollout.max_queued); "
                "try again later"
            )

    def _require_serving(self) -> None:
        state = self._view.state
        if state in (common_pb2.REPLICA_STATE_BROKEN, common_pb2.REPLICA_STATE_DRAINING):
            raise UnavailableError(f"this engine is {common_pb2.ReplicaState.Name(state)}; ask another replica")

    async def _check(self, request: generate_pb2.GenerateRequest) -> Turn:
        if not request.images:
            return self._engine.checker.check(request, ())
        files = await self._images.files(request.images)
        # Decoding takes milliseconds that the event loop does not have.
        turn = await asyncio.to_thread(self._engine.checker.check, request, files)
        self._require_serving()  # again: the state may have changed
        return turn

    def _respond(self, generation: Generation) -> generate_pb2.GenerateResponse:
        return generate_pb2.GenerateResponse(
            output_ids=generation.output_ids,
            logprobs=generation.logprobs,
            version_spans=_spans(generation),
            finish_reason=_FINISH_REASONS[generation.stopped],
            usage=_usage(generation),
            replica_id=self._view.replica_id,
        )

    def _chunk(self, part: Generation) -> generate_pb2.GenerateChunk:
        is_first, is_last = part.num_tokens_so_far == len(part.output_ids), part.stopped is not None
        return generate_pb2.GenerateChunk(
            output_ids=part.output_ids,
            logprobs=part.logprobs,
            version_spans=_spans(part),
            finish_reason=_FINISH_REASONS[part.stopped],
            usage=_usage(part) if is_first or is_last else None,
            replica_id=self._view.replica_id,
        )


def _spans(generation: Generation) -> list[common_pb2.VersionSpan]:
    return [
        common_pb2.VersionSpan(num_tokens=length, policy_version=version)
        for length, version in generation.version_spans
    ]


def _usage(generation: Generation) -> generate_pb2.Usage:
    return generate_pb2.Usage(
        num_prompt_tokens=generation.num_prompt_tokens,
        num_cached_tokens=generation.num_cached_tokens,
        num_output_tokens=generation.num_tokens_so_far,
    )


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Takes pushes, and the order to drain."""

    def __init__(self, receiver: WeightReceiver, view: ReplicaView, drain: Drain) -> None:
        """Hand pushes to `receiver`; `view` answers for the replica, `drain` ends its service."""
        self._receiver = receiver
        self._view = view
        self._drain = drain

    async def GetReplica(  # noqa: N802 - the contract's name
        self, request: rollout_pb2.GetReplicaRequest, context: Context
    ) -> rollout_pb2.GetReplicaResponse:
        """Tell what the lease tells."""
        await self._view.refresh()
        return rollout_pb2.GetReplicaResponse(replica=self._view.describe())

    async def PrepareWeights(  # noqa: N802 - the contract's name
        self, request: rollout_pb2.PrepareWeightsRequest, context: Context
    ) -> rollout_pb2.PrepareWeightsResponse:
        """Announce a push: join its process group, or check its source."""
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
        )
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
        manifest = await self._receiver.receive(request.push_id)
        return rollout_pb2.ReceiveWeightsResponse(num_tensors=len(manifest.tensors), num_bytes=manifest.num_bytes)

    async def VerifyWeights(  # noqa: N802 - the contract's name
        self, request: rollout_pb2.VerifyWeightsRequest, context: Context
    ) -> rollout_pb2.VerifyWeightsResponse:
        """Compute digests."""
        return rollout_pb2.VerifyWeightsResponse(digests=await self._receiver.verify(request.push_id))

    async def CommitWeights(  # noqa: N802 - the contract's name
        self, request: rollout_pb2.CommitWeightsRequest, context: Context
    ) -> rollout_pb2.CommitWeightsResponse:
        """Make the version current."""
        await self._receiver.commit(request.push_id)
        return rollout_pb2.CommitWeightsResponse()

    async def ResumeGeneration(  # noqa: N802 - the contract's name
        self, request: rollout_pb2.ResumeGenerationRequest, context: Context
    ) -> rollout_pb2.ResumeGenerationResponse:
        """Let generation go on."""
        await self._receiver.resume(request.push_id)
        return rollout_pb2.ResumeGenerationResponse()

    async def AbortWeights(  # noqa: N802 - the contract's name
        self, request: rollout_pb2.AbortWeightsRequest, context: Context
    ) -> rollout_pb2.AbortWeightsResponse:
        """End a push that cannot be completed."""
        return rollout_pb2.AbortWeightsResponse(state=await self._receiver.abort(request.push_id, request.reason))

    async def DrainReplica(  # noqa: N802 - the contract's name
        self, request: rollout_pb2.DrainReplicaRequest, context: Context
    ) -> rollout_pb2.DrainReplicaResponse:
        """Take nothing new, and return when nothing runs."""
        if not (math.isfinite(request.grace_s) and request.grace_s >= 0):
            raise InvalidRequestError(f"grace_s = {request.grace_s} must be 0 (hand over at once) or greater")
        drained = await self._drain.run(request.grace_s)
        return rollout_pb2.DrainReplicaResponse(
            num_finished=drained.num_finished, num_handed_over=drained.num_handed_over
        )
