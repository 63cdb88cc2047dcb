"""An engine without a model: real gRPC, a real lease, made-up tokens."""

import asyncio
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Self

from penstock.bus.buckets import leases
from penstock.bus.buckets.replica_lease import write_replica
from penstock.bus.connection import Bus
from penstock.bus.image_store import ImageStore
from penstock.errors import InvalidRequestError, NotReadyError, PenstockError, UnavailableError
from penstock.rpc.server import RpcServer, service_name
from penstock.runtime.security import Security
from penstock.testing.answers import Answer, chunk_of, counting, scored
from penstock.v1 import common_pb2, generate_pb2, generate_pb2_grpc, rollout_pb2, rollout_pb2_grpc

_CHUNK_INTERVAL_S = 1.0


class SimulatedEngine(generate_pb2_grpc.GenerateServiceServicer, rollout_pb2_grpc.RolloutServiceServicer):
    """One engine. Its answer, delays and faults may be changed while it runs, its lease through `update`."""

    def __init__(
        self,
        bus: Bus,
        *,
        answer: Answer = counting,
        replica_id: str = "",
        policy_version: int = 0,
        state: common_pb2.ReplicaState.ValueType = common_pb2.REPLICA_STATE_READY,
        max_running: int = 8,
        delay_s: float = 0.0,
        token_s: float = 0.0,
        error: PenstockError | None = None,
        fail_after: int | None = None,
        fail_with: PenstockError | None = None,
        hang_after: int | None = None,
        die_after: int | None = None,
        port: int = 0,
        security: Security | None = None,
        tells_load: bool = False,
    ) -> None:
        """Prepare an engine.

        Args:
            bus: The bus that holds its lease.
            answer: Makes its answers.
            replica_id: Its name; empty: a random one.
            policy_version: The version that it serves.
            state: The state in its lease.
            max_running: The number of concurrent calls in its lease.
            delay_s: Seconds before the first token of a call, or before `error`.
            token_s: Seconds for each token of a stream.
            error: Every call fails with it, before its first token.
            fail_after: After this many tokens a stream sends what it has and ends with `fail_with`.
            fail_with: None means UNAVAILABLE.
            hang_after: After this many tokens a stream sends what it has, and the rest when `released` is set.
            die_after: After this many tokens of a stream the process is killed.
            port: Port to listen on; 0 takes any free one.
            security: Tokens and TLS required of callers.
            tells_load: Whether its lease shows its number of calls, as those of real engines do.
        """
        self.replica = common_pb2.Replica(
            replica_id=replica_id or f"engine-{uuid.uuid4().hex[:8]}",
            role=common_pb2.REPLICA_ROLE_UNIFIED,
            state=state,
            policy_version=policy_version,
            max_running=max_running,
        )
        self.answer = answer
        self.delay_s = delay_s
        self.token_s = token_s
        self.error = error
        self.fail_after = fail_after
        self.fail_with = fail_with
        self.hang_after = hang_after
        self.die_after = die_after
        self.image_store: ImageStore | None = None
        """The store of images; a missing image fails the call. None: images are not looked up."""
        self.scores = True
        """Whether it reports likeliest ids and prompts' logprobs on request."""
        self.num_calls = 0
        self.num_streams = 0
        self.num_answered = 0
        self.num_cancelled = 0
        self.num_running = 0
        self.requests: list[generate_pb2.GenerateRequest] = []
        self.deadlines_s: list[float | None] = []
        self._security = security
        self._bus = bus
        self._port = port
        self._tells_load = tells_load
        self._server: RpcServer | None = None
        self._lease: leases.Lease | None = None
        self.released = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._refusing = False
        self._handing_over = False

    @property
    def replica_id(self) -> str:
        """The engine's name in its lease."""
        return self.replica.replica_id

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> generate_pb2.GenerateResponse:
        """Wait for `delay_s`, then fail with `error` or answer."""
        with self._counted(request, context):
            await self._delay(request)
            self.num_answered += 1
            return self._answer(request)

    async def GenerateStream(  # noqa: N802 - gRPC's name
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        """Answer token by token."""
        self.num_streams += 1
        with self._counted(request, context):
            await self._delay(request)
            answer = self._answer(request)
            async for first, end in self._chunks(len(answer.output_ids), max(1, request.chunk_tokens)):
                yield chunk_of(answer, first, end)
            self.num_answered += 1

    async def GetReplica(  # noqa: N802 - gRPC's name
        self, request: rollout_pb2.GetReplicaRequest, context: Any
    ) -> rollout_pb2.GetReplicaResponse:
        """Describe the replica as the lease does."""
        return rollout_pb2.GetReplicaResponse(replica=self.replica)

    async def DrainReplica(  # noqa: N802 - gRPC's name
        self, request: rollout_pb2.DrainReplicaRequest, context: Any
    ) -> rollout_pb2.DrainReplicaResponse:
        """Refuse new calls, show that in the lease, let calls finish for `grace_s`, hand over the remaining streams."""
        self._refusing = True
        await self.update(state=common_pb2.REPLICA_STATE_DRAINING)
        num_before = self.num_running
        with suppress(TimeoutError):
            async with asyncio.timeout(request.grace_s):
                await self._idle.wait()
        num_left, self._handing_over = self.num_running, True
        await self._idle.wait()
        return rollout_pb2.DrainReplicaResponse(num_finished=num_before - num_left, num_handed_over=num_left)

    def _answer(self, request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateResponse:
        answer = self.answer(request, self.replica)
        return scored(answer, request) if self.scores else answer

    @contextmanager
    def _counted(self, request: generate_pb2.GenerateRequest, context: Any) -> Iterator[None]:
        self.num_calls += 1
        self.num_running += 1
        self._idle.clear()
        self.requests.append(request)
        self.deadlines_s.append(context.time_remaining())
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
            if not self.num_running:
                self._idle.set()

    async def _delay(self, request: generate_pb2.GenerateRequest) -> None:
        if request.sampling.max_new_tokens < 1:
            raise InvalidRequestError(f"max_new_tokens = {request.sampling.max_new_tokens} must be at least 1")
        if self._refusing:
            raise NotReadyError("this engine is REPLICA_STATE_DRAINING; ask another replica")
        if request.min_policy_version > self.replica.policy_version:
            raise NotReadyError(f"policy version {self.replica.policy_version} < {request.min_policy_version}")
        if request.exact_policy_version not in (0, self.replica.policy_version):
            raise NotReadyError(f"policy version {self.replica.policy_version} is not {request.exact_policy_version}")
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        for image in request.images if self.image_store is not None else ():
            assert self.image_store is not None
            await self.image_store.get(image.stored.scope, image.stored.sha256)

    async def _chunks(self, num_tokens: int, size: int) -> AsyncIterator[tuple[int, int]]:
        """Yield the first token and the end of each chunk, when it is due."""
        sent, sent_at = 0, time.monotonic()
        for made in range(num_tokens):
            fails = made == self.fail_after or self._handing_over
            is_due = made - sent >= size or time.monotonic() - sent_at >= _CHUNK_INTERVAL_S
            if made > sent and (is_due or fails or made == self.hang_after):
                yield sent, made
                sent, sent_at = made, time.monotonic()
            if made == self.die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if made == self.hang_after:
                await self.released.wait()
            if self._handing_over:
                raise NotReadyError("this engine drains; play the rest on another replica")
            if fails:
                raise self.fail_with or UnavailableError(f"told to fail after {made} tokens")
            await asyncio.sleep(self.token_s)
        yield sent, num_tokens

    async def update(self, **fields: Any) -> None:
        """Change fields of the replica and renew the lease at once."""
        for name, value in fields.items():
            setattr(self.replica, name, value)
        assert self._lease is not None
        await self._lease.renew()

    async def stop_serving(self) -> None:
        """Drop all calls and close the port, as a crash does, but keep the lease."""
        assert self._server is not None
        await self._server.drain(0.0)

    async def serve_again(self) -> None:
        """Serve again after `stop_serving`, at the same address."""
        self._port = int(self.replica.address.rpartition(":")[2])
        await self._serve()

    async def _serve(self) -> None:
        self._server = RpcServer(host="127.0.0.1", port=self._port, security=self._security)
        self._server.add(
            generate_pb2_grpc.add_GenerateServiceServicer_to_server,
            self,
            service_name(generate_pb2.DESCRIPTOR, "GenerateService"),
        )
        self._server.add(
            rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
            self,
            service_name(rollout_pb2.DESCRIPTOR, "RolloutService"),
        )
        await self._server.start()
        self.replica.address = self._server.address

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Serve and hold the lease during the context."""
        await self._serve()
        try:
            async with replica_lease(self._bus, self.replica_id, self._describe) as self._lease:
                yield self
        finally:
            await self.stop_serving()

    def _describe(self) -> bytes:
        if self._tells_load:
            self.replica.num_running = min(self.num_running, self.replica.max_running)
            self.replica.num_queued = self.num_running - self.replica.num_running
        return write_replica(self.replica)


@asynccontextmanager
async def replica_lease(bus: Bus, replica_id: str, describe: Callable[[], bytes]) -> AsyncIterator[leases.Lease]:
    """Hold a replica's lease with the value of `describe` during the context; it is written on entry."""
    ttl_s = bus.config.lease_ttl_s
    bucket = await bus.bucket("replicas", ttl_s=ttl_s)
    async with leases.held(bucket, replica_id, describe, ttl_s=ttl_s) as lease:
        await lease.renew()
        yield lease
