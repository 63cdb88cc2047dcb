"""The engine's gRPC service that plays turns."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import grpc.aio

from penstock.errors import InvalidRequestError, NotReadyError, OverloadedError
from penstock.rpc.server import deadline_s
from penstock.v1 import common_pb2, generate_pb2, generate_pb2_grpc
from services.rollout.engine.call_span import CallSpan
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.crash_streak import CrashStreak
from services.rollout.engine.image_source import ImageSource
from services.rollout.engine.prompt import CheckedRequest
from services.rollout.engine.replica_view import ReplicaView
from services.rollout.engine.sglang.engine import SglangEngine
from services.rollout.engine.sglang.generation import Generation, TopIds
from services.rollout.engine.sglang.routed_experts import message_of
from services.rollout.engine.weight_sync.weight_receiver import WeightReceiver

Context = grpc.aio.ServicerContext[Any, Any]

_REQUEST_DEADLINE_S = 600.0
"""Seconds for requests whose caller sets no deadline. Routers and workers set one; grpcurl does not."""
_QUEUED_PER_RUNNING = 4
"""Requests that may wait for each running one. A router keeps fewer here; the bound is for callers without a router,
whose requests would wait for minutes."""
_FINISH_REASONS = {
    True: generate_pb2.FINISH_REASON_STOP,
    False: generate_pb2.FINISH_REASON_LENGTH,
    None: generate_pb2.FINISH_REASON_UNSPECIFIED,
}


class GenerateServicer(generate_pb2_grpc.GenerateServiceServicer):
    """Plays turns."""

    def __init__(
        self,
        config: RolloutConfig,
        engine: SglangEngine,
        receiver: WeightReceiver,
        view: ReplicaView,
        images: ImageSource,
        crashes: CrashStreak,
    ) -> None:
        """Generate with `engine` while `receiver` holds sound weights; `images` finds images by hash."""
        self._config = config
        self._images = images
        self._engine = engine
        self._receiver = receiver
        self._view = view
        self._crashes = crashes
        self._num_calls = 0

    async def Generate(self, request: generate_pb2.GenerateRequest, context: Context) -> generate_pb2.GenerateResponse:  # noqa: N802 - the contract's name
        """Play one turn."""
        with self._admitted(request) as span:
            async with asyncio.timeout(deadline_s(context, default=_REQUEST_DEADLINE_S)):
                generation = await self._engine.generate(await self._check(request))
            span.add(generation)
        self._crashes.note_answer()
        return self._respond(generation, request)

    async def GenerateStream(  # noqa: N802 - the contract's name
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        """Play one turn and stream its tokens as they arrive."""
        if request.chunk_tokens < 0:
            raise InvalidRequestError(f"chunk_tokens = {request.chunk_tokens} must be 0 (every token) or greater")
        remaining_s = deadline_s(context, default=_REQUEST_DEADLINE_S)
        deadline = asyncio.get_running_loop().time() + remaining_s
        with self._admitted(request) as span:
            async with asyncio.timeout_at(deadline):
                checked = await self._check(request)
            async with aclosing(self._engine.stream(checked, chunk_tokens=request.chunk_tokens)) as parts:
                while True:
                    # The deadline does not cover the loop: passing while a chunk is written must not end the writer.
                    async with asyncio.timeout_at(deadline):
                        part = await anext(parts, None)
                    if part is None:
                        return
                    self._crashes.note_answer()
                    span.add(part)
                    yield self._chunk(part, request)

    @contextmanager
    def _admitted(self, request: generate_pb2.GenerateRequest) -> Iterator[CallSpan]:
        self._admit(request)
        self._num_calls += 1
        try:
            with self._crashes.counting(), CallSpan(request) as span:
                yield span
        finally:
            self._num_calls -= 1

    def _admit(self, request: generate_pb2.GenerateRequest) -> None:
        self._require_serving(request)
        limit = (1 + _QUEUED_PER_RUNNING) * self._config.max_running
        if self._num_calls >= limit:
            raise OverloadedError(
                f"{limit} requests are in the engine already ({1 + _QUEUED_PER_RUNNING} times rollout.max_running); "
                "try again later"
            )

    def _require_serving(self, request: generate_pb2.GenerateRequest) -> None:
        """Refuse a request that this engine may not answer, because of its state or its version."""
        state, version = self._view.state, self._receiver.version
        if state in (common_pb2.REPLICA_STATE_BROKEN, common_pb2.REPLICA_STATE_DRAINING):
            raise NotReadyError(f"this engine is {common_pb2.ReplicaState.Name(state)}; ask another replica")
        if request.min_policy_version > version:
            raise NotReadyError(
                f"min_policy_version = {request.min_policy_version}, but this engine serves version {version}; ask "
                "another replica, or wait for its next push"
            )
        if request.exact_policy_version not in (0, version):
            raise NotReadyError(
                f"exact_policy_version = {request.exact_policy_version}, but this engine serves version {version}; ask "
                "a replica that is held at that version"
            )

    async def _check(self, request: generate_pb2.GenerateRequest) -> CheckedRequest:
        if not request.images:
            return self._engine.checker.check(request, ())
        files = await self._images.files(request.images)
        # Decoding takes milliseconds, too long for the event loop.
        checked = await asyncio.to_thread(self._engine.checker.check, request, files)
        self._require_serving(request)  # again: the state may have changed
        return checked

    def _respond(self, generation: Generation, request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateResponse:
        return generate_pb2.GenerateResponse(
            output_ids=generation.output_ids,
            logprobs=generation.logprobs,
            version_spans=_spans(generation),
            finish_reason=_FINISH_REASONS[generation.stopped],
            usage=_usage(generation),
            replica_id=self._view.replica_id,
            top_logprobs=_top(generation.top),
            prompt_logprobs=_prompt(generation),
            routed_experts=self._experts(generation, request),
        )

    def _chunk(self, part: Generation, request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateChunk:
        is_first, is_last = part.num_tokens_so_far == len(part.output_ids), part.stopped is not None
        return generate_pb2.GenerateChunk(
            output_ids=part.output_ids,
            logprobs=part.logprobs,
            version_spans=_spans(part),
            finish_reason=_FINISH_REASONS[part.stopped],
            usage=_usage(part) if is_first or is_last else None,
            replica_id=self._view.replica_id,
            top_logprobs=_top(part.top),
            prompt_logprobs=_prompt(part),
            routed_experts=self._experts(part, request),
        )

    def _experts(
        self, generation: Generation, request: generate_pb2.GenerateRequest
    ) -> generate_pb2.RoutedExperts | None:
        if generation.routed_experts is None or self._engine.mixture is None:
            return None
        return message_of(
            generation.routed_experts,
            self._engine.mixture,
            first_token=request.routed_experts_from,
            num_tokens=generation.num_prompt_tokens + generation.num_tokens_so_far,
        )


def _spans(generation: Generation) -> list[common_pb2.VersionSpan]:
    return [
        common_pb2.VersionSpan(num_tokens=length, policy_version=version)
        for length, version in generation.version_spans
    ]


def _top(tops: Sequence[TopIds]) -> list[generate_pb2.TopLogprobs]:
    return [generate_pb2.TopLogprobs(ids=top.ids, logprobs=top.logprobs) for top in tops]


def _prompt(generation: Generation) -> generate_pb2.PromptLogprobs | None:
    scores = generation.prompt
    if scores is None:
        return None
    return generate_pb2.PromptLogprobs(logprobs=scores.logprobs, top_logprobs=_top(scores.top))


def _usage(generation: Generation) -> generate_pb2.Usage:
    return generate_pb2.Usage(
        num_prompt_tokens=generation.num_prompt_tokens,
        num_cached_tokens=generation.num_cached_tokens,
        num_output_tokens=generation.num_tokens_so_far,
    )
