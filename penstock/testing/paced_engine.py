"""A simulated engine that keeps time: a number of slots, answers of given lengths, tokens at a given rate, pushes.

It is so cheap that hundreds of them fit into one process. It delivers tokens as the real engine does: the first at
once, then `chunk_tokens` or the tokens of one second, more of long answers. It also takes a push as the real engine
does: it reads the trainer's shared memory, compares true digests, changes its version at commit, and tells its lease of
it without waiting. It counts a prompt as cached once another call of the same group and version has begun. Invariant:
while it is paused no answer makes progress.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self

from penstock.bus.connection import Bus
from penstock.errors import ChecksumError, InvalidRequestError, NotReadyError, UnavailableError
from penstock.rpc.addressee import require_addressee
from penstock.runtime.process import end_task
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.v1 import common_pb2, generate_pb2, rollout_pb2

_CHUNK_INTERVAL_S = 1.0
_GROWTH = 16
"""A chunk may have, and wait for, one in this many of the tokens before it."""
_TOKEN = 65
"""Every token that it generates: a letter in any vocabulary of bytes."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Length and speed of one answer."""

    num_tokens: int
    token_s: float
    """Seconds for each token, including the first."""


class Weights(Protocol):
    """Reads pushes: `services.rollout.testing.weight_reader.WeightReader`."""

    def read(self, push: rollout_pb2.PrepareWeightsRequest) -> Mapping[str, int]:
        """Return the digest of each parameter in the trainer's memory."""
        ...


class PacedEngine(SimulatedEngine):
    """A simulated engine with slots and a pace."""

    def __init__(
        self, bus: Bus, *, pace: Callable[[generate_pb2.GenerateRequest], Pace], weights: Weights, **settings: Any
    ) -> None:
        """Prepare an engine.

        Args:
            bus: The bus that holds its lease.
            pace: Length and speed of each answer.
            weights: Reads pushes; engines of one process share it.
            settings: Settings of `SimulatedEngine`; `max_running` is the number of slots.
        """
        super().__init__(bus, tells_load=True, **settings)
        self._pace = pace
        self._weights = weights
        self._slots = asyncio.Semaphore(self.replica.max_running)
        self._clock = PausableClock()
        self._cached_groups: set[str] = set()
        self._changed = asyncio.Event()
        """Set on every change that the lease must announce at once."""
        self._push: rollout_pb2.PrepareWeightsRequest | None = None
        self._num_replaced = 0
        """Replacements of a newer version by an older one, each of which ends the running calls."""

    async def GenerateStream(  # noqa: N802 - gRPC's name
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        """Wait for a slot, then answer at the pace of the call."""
        self.num_streams += 1
        with self._counted(request, context):
            await self._delay(request)
            num_replaced = self._num_replaced
            async with self._slots:
                pace, started = self._pace(request), self._clock.time()
                num_cached = len(request.input_ids) if request.group_id in self._cached_groups else 0
                for sent, end in itertools.pairwise(_chunk_ends(pace, request.chunk_tokens)):
                    await self._clock.wait_until(started + end * pace.token_s)
                    if self._num_replaced > num_replaced:
                        raise UnavailableError("the engine was given an older version; continue with another replica")
                    if not sent and request.group_id:
                        self._cached_groups.add(request.group_id)
                    yield self._chunk(request, sent, end, num_cached=num_cached, is_last=end == pace.num_tokens)
            self.num_answered += 1

    def _chunk(
        self, request: generate_pb2.GenerateRequest, sent: int, end: int, *, num_cached: int, is_last: bool
    ) -> generate_pb2.GenerateChunk:
        """Return tokens `sent` up to `end`. A chunk has one version, that of its last token."""
        num_tokens = end - sent
        chunk = generate_pb2.GenerateChunk(
            output_ids=[_TOKEN] * num_tokens,
            logprobs=[-1.0] * num_tokens,
            version_spans=[common_pb2.VersionSpan(num_tokens=num_tokens, policy_version=self.replica.policy_version)],
            replica_id=self.replica_id,
        )
        if is_last:
            chunk.finish_reason = generate_pb2.FINISH_REASON_STOP
        if is_last or not sent:
            chunk.usage.num_prompt_tokens = len(request.input_ids)
            chunk.usage.num_cached_tokens = num_cached
            chunk.usage.num_output_tokens = end
        return chunk

    async def PrepareWeights(  # noqa: N802 - gRPC's name
        self, request: rollout_pb2.PrepareWeightsRequest, context: Any
    ) -> rollout_pb2.PrepareWeightsResponse:
        """Announce a push; accepts only shared memory, and only growing versions unless the push says otherwise."""
        self._prepare(request, context)
        return rollout_pb2.PrepareWeightsResponse()

    async def UpdateWeights(  # noqa: N802 - gRPC's name
        self, request: rollout_pb2.UpdateWeightsRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.UpdateWeightsResponse]:
        """Pause all answers, read the weights, and resume with the push's version; if it is older than the one before,
        running calls fail."""
        if request.HasField("prepare"):
            self._prepare(request.prepare, context)
            yield rollout_pb2.UpdateWeightsResponse(stage=rollout_pb2.UPDATE_STAGE_PREPARED)
        push = self._require(request.push_id)
        self._clock.pause()
        self._enter(common_pb2.REPLICA_STATE_UPDATING)
        yield rollout_pb2.UpdateWeightsResponse(stage=rollout_pb2.UPDATE_STAGE_PAUSED)
        held = self._weights.read(push)
        yield rollout_pb2.UpdateWeightsResponse(stage=rollout_pb2.UPDATE_STAGE_RECEIVED)
        if held != dict(request.digests):
            raise ChecksumError("the memory does not hold the weights whose digests were sent")
        self._require(request.push_id)
        self._num_replaced += push.policy_version < self.replica.policy_version
        self.replica.policy_version = push.policy_version
        self._cached_groups.clear()
        self._end_push()

    async def AbortWeights(  # noqa: N802 - gRPC's name
        self, request: rollout_pb2.AbortWeightsRequest, context: Any
    ) -> rollout_pb2.AbortWeightsResponse:
        """Return to the version before; the weights that were read change nothing in an engine without a model."""
        if self._push is not None and self._push.push_id == request.push_id:
            self._end_push()
        return rollout_pb2.AbortWeightsResponse(state=self.replica.state)

    def _prepare(self, request: rollout_pb2.PrepareWeightsRequest, context: Any) -> None:
        require_addressee(context, self.replica_id)
        if request.policy_version < self.replica.policy_version and not request.replaces_newer:
            raise InvalidRequestError(f"policy_version = {request.policy_version} is older than this engine's")
        if request.WhichOneof("source") != "shared_memory":
            raise NotReadyError("a simulated engine reads shared memory only; let it share a machine with the trainer")
        self._push = request

    def _require(self, push_id: str) -> rollout_pb2.PrepareWeightsRequest:
        if self._push is None or self._push.push_id != push_id:
            raise NotReadyError(f"push {push_id} was not prepared here")
        return self._push

    def _end_push(self) -> None:
        self._push = None
        self._clock.resume()
        self._enter(common_pb2.REPLICA_STATE_READY)

    def _enter(self, state: common_pb2.ReplicaState.ValueType) -> None:
        self.replica.state = state
        self._changed.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Serve and hold the lease during the context."""
        async with super().running():
            assert self._lease is not None, "the base class holds it"
            renewing = asyncio.create_task(
                self._lease.renew_on_change(
                    self._changed, is_passing=lambda: self.replica.state == common_pb2.REPLICA_STATE_UPDATING
                )
            )
            try:
                yield self
            finally:
                await end_task(renewing)


def _chunk_ends(pace: Pace, chunk_tokens: int) -> list[int]:
    """Return 0 and the tokens sent after each chunk: one, then steps of `chunk_tokens` or the interval's tokens, which
    grow with the answer."""
    ends, least = [0, 1], int(_CHUNK_INTERVAL_S / pace.token_s) + 1
    while ends[-1] < pace.num_tokens:
        grown = ends[-1] // _GROWTH if chunk_tokens > 1 else 0
        size = min(max(1, chunk_tokens, grown), max(least, grown))
        ends.append(min(ends[-1] + size, pace.num_tokens))
    return ends


class PausableClock:
    """A clock of seconds that stops while it is paused."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start running, by `now`."""
        self._now = now
        self._paused_s = 0.0
        self._paused_at: float | None = None
        self._runs = asyncio.Event()
        self._runs.set()

    def time(self) -> float:
        """Return the time in seconds."""
        now = self._now() if self._paused_at is None else self._paused_at
        return now - self._paused_s

    def pause(self) -> None:
        """Stop; no effect if the clock is stopped."""
        if self._paused_at is None:
            self._paused_at = self._now()
            self._runs.clear()

    def resume(self) -> None:
        """Continue; no effect if the clock is running."""
        if self._paused_at is not None:
            self._paused_s += self._now() - self._paused_at
            self._paused_at = None
            self._runs.set()

    async def wait_until(self, at: float) -> None:
        """Wait until the clock runs and shows `at` or later."""
        while (left := at - self.time()) > 0 or not self._runs.is_set():
            await self._runs.wait()
            await asyncio.sleep(max(0.0, left))
