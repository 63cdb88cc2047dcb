"""An engine without a model, for tests of what talks to engines: real gRPC, a real lease, made-up tokens.

It answers with ids 1000, 1001, 1002, ..., goes on after them where a prompt ends with some, and counts what happens to
it. In a process of its own, to be killed: `python -m tests.simulated_engine --url=nats://... --run=NAME --replica-id=ID
[--delay-s=1] [--token-s=0.1] [--die-after=5]`; it prints its address once it serves.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self

from google.protobuf import json_format

from penstock.bus import leases
from penstock.bus.connection import Bus, connect
from penstock.config import BusConfig, LogConfig
from penstock.errors import InvalidRequestError, NotReadyError, PenstockError, UnavailableError
from penstock.rpc.server import RpcServer, service_name
from penstock.runtime.security import Security
from penstock.telemetry import log
from penstock.v1 import common_pb2, generate_pb2, generate_pb2_grpc, rollout_pb2, rollout_pb2_grpc

FIRST_ID = 1000
"""What it answers first; ids of prompts are below."""

_CHUNK_INTERVAL_S = 0.25


class SimulatedEngine(generate_pb2_grpc.GenerateServiceServicer, rollout_pb2_grpc.RolloutServiceServicer):
    """One engine; change `delay_s`, `error`, what else goes wrong and, with `update`, its lease while it runs."""

    def __init__(
        self,
        bus: Bus,
        *,
        replica_id: str = "",
        policy_version: int = 0,
        state: int = common_pb2.REPLICA_STATE_READY,
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
    ) -> None:
        """Make one.

        Args:
            bus: Where its lease is kept.
            replica_id: Its name; empty makes one up.
            policy_version: That it serves.
            state: That its lease tells.
            max_running: That its lease tells.
            delay_s: How long a call waits before its first token, or before `error`.
            token_s: How long each token of a stream takes.
            error: What every call fails with, before its first token.
            fail_after: After so many tokens a stream sends what it has and ends with `fail_with`.
            fail_with: None: UNAVAILABLE.
            hang_after: After so many tokens a stream sends what it has and then nothing more.
            die_after: After so many tokens of a stream the process is killed.
            port: To listen on; 0 takes any.
            security: What it asks of callers.
        """
        self.replica = common_pb2.Replica(
            replica_id=replica_id or f"engine-{uuid.uuid4().hex[:8]}",
            role=common_pb2.REPLICA_ROLE_UNIFIED,
            state=state,
            policy_version=policy_version,
            max_running=max_running,
        )
        self.delay_s = delay_s
        self.token_s = token_s
        self.error = error
        self.fail_after = fail_after
        self.fail_with = fail_with
        self.hang_after = hang_after
        self.die_after = die_after
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
        self._server: RpcServer | None = None
        self._lease: leases.Lease | None = None
        self._refusing = False
        self._handing_over = False

    @property
    def replica_id(self) -> str:
        """Its name."""
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
        """The same, token by token."""
        self.num_streams += 1
        with self._counted(request, context):
            await self._delay(request)
            answer = self._answer(request)
            async for first, end in self._pieces(len(answer.output_ids), max(1, request.chunk_tokens)):
                yield chunk_of(answer, first, end)
            self.num_answered += 1

    async def GetReplica(  # noqa: N802 - gRPC's name
        self, request: rollout_pb2.GetReplicaRequest, context: Any
    ) -> rollout_pb2.GetReplicaResponse:
        """What the lease tells."""
        return rollout_pb2.GetReplicaResponse(replica=self.replica)

    async def DrainReplica(  # noqa: N802 - gRPC's name
        self, request: rollout_pb2.DrainReplicaRequest, context: Any
    ) -> rollout_pb2.DrainReplicaResponse:
        """Refuse, say so in the lease, let calls finish for a while, hand over the streams that are left."""
        self._refusing = True
        await self.update(state=common_pb2.REPLICA_STATE_DRAINING)
        num_before, deadline = self.num_running, time.monotonic() + request.grace_s
        while self.num_running and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        num_left, self._handing_over = self.num_running, True
        while self.num_running:
            await asyncio.sleep(0.01)
        return rollout_pb2.DrainReplicaResponse(num_finished=num_before - num_left, num_handed_over=num_left)

    @contextmanager
    def _counted(self, request: generate_pb2.GenerateRequest, context: Any) -> Iterator[None]:
        self.num_calls += 1
        self.num_running += 1
        self.requests.append(request)
        self.deadlines_s.append(context.time_remaining())
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

    async def _delay(self, request: generate_pb2.GenerateRequest) -> None:
        if request.sampling.max_new_tokens < 1:
            raise InvalidRequestError(f"max_new_tokens = {request.sampling.max_new_tokens} must be at least 1")
        if self._refusing:
            raise UnavailableError("this engine is REPLICA_STATE_DRAINING; ask another replica")
        if request.min_policy_version > self.replica.policy_version:
            raise NotReadyError(f"policy version {self.replica.policy_version} < {request.min_policy_version}")
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error

    async def _pieces(self, num_tokens: int, size: int) -> AsyncIterator[tuple[int, int]]:
        """First and end of each chunk, when it is due."""
        sent, sent_at = 0, time.monotonic()
        for made in range(num_tokens):
            ends = made in (self.fail_after, self.hang_after) or self._handing_over
            if made > sent and (ends or made - sent >= size or time.monotonic() - sent_at >= _CHUNK_INTERVAL_S):
                yield sent, made
                sent, sent_at = made, time.monotonic()
            if made == self.die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if made == self.hang_after:
                await asyncio.Event().wait()
            if ends:
                raise self.fail_with or UnavailableError(f"told to fail after {made} tokens")
            await asyncio.sleep(self.token_s)
        yield sent, num_tokens

    def _answer(self, request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateResponse:
        first = FIRST_ID
        if request.input_ids and request.input_ids[-1] >= FIRST_ID:
            first = request.input_ids[-1] + 1
        ids = list(range(first, first + request.sampling.max_new_tokens))
        stops = [token for token in ids if token in request.sampling.stop_token_ids]
        if stops:
            ids = ids[: ids.index(stops[0]) + 1]
        return generate_pb2.GenerateResponse(
            output_ids=ids,
            logprobs=[logprob_of(token) for token in ids],
            version_spans=[common_pb2.VersionSpan(num_tokens=len(ids), policy_version=self.replica.policy_version)],
            finish_reason=generate_pb2.FINISH_REASON_STOP if stops else generate_pb2.FINISH_REASON_LENGTH,
            usage=generate_pb2.Usage(num_prompt_tokens=len(request.input_ids), num_output_tokens=len(ids)),
            replica_id=self.replica_id,
        )

    async def update(self, **fields: Any) -> None:
        """Change fields of its Replica and renew the lease at once."""
        for name, value in fields.items():
            setattr(self.replica, name, value)
        assert self._lease is not None
        await self._lease.renew()

    async def stop_serving(self) -> None:
        """Drop all calls and the port, as a crash does, but keep the lease."""
        assert self._server is not None
        await self._server.drain(0.0)

    async def serve_again(self) -> None:
        """After `stop_serving`, under the same address."""
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
        ttl_s = self._bus.config.lease_ttl_s
        bucket = await self._bus.bucket("replicas", ttl_s=ttl_s)
        try:
            async with leases.held(bucket, self.replica_id, self._describe, ttl_s=ttl_s) as self._lease:
                await self._lease.renew()
                yield self
        finally:
            await self.stop_serving()

    def _describe(self) -> bytes:
        return json_format.MessageToJson(self.replica, preserving_proto_field_name=True).encode()


def logprob_of(token: int) -> float:
    """The logprob that it gives to an id: each has its own."""
    return -(token - FIRST_ID + 1) / 64


def chunk_of(response: generate_pb2.GenerateResponse, first: int, end: int) -> generate_pb2.GenerateChunk:
    """The part of an answer from token `first` up to `end`, as a stream has it."""
    chunk = generate_pb2.GenerateChunk(
        output_ids=response.output_ids[first:end],
        logprobs=response.logprobs[first:end],
        replica_id=response.replica_id,
    )
    start = 0
    for span in response.version_spans:
        num_tokens = min(end, start + span.num_tokens) - max(first, start)
        start += span.num_tokens
        if num_tokens > 0:
            chunk.version_spans.add(num_tokens=num_tokens, policy_version=span.policy_version)
    if end == len(response.output_ids):
        chunk.finish_reason = response.finish_reason
    if first == 0 or end == len(response.output_ids):
        chunk.usage.CopyFrom(response.usage)
        chunk.usage.num_output_tokens = end
    return chunk


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--replica-id", required=True)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--die-after", type=int, default=None)
    parser.add_argument("--lease-ttl-s", type=float, default=1.0)
    options = parser.parse_args()
    log.configure(LogConfig(), service="simulated-engine")  # to standard error: standard output is for the address
    async with connect(BusConfig(url=options.url, lease_ttl_s=options.lease_ttl_s), run=options.run) as bus:
        engine = SimulatedEngine(
            bus,
            replica_id=options.replica_id,
            delay_s=options.delay_s,
            token_s=options.token_s,
            die_after=options.die_after,
        )
        async with engine.running():
            sys.stdout.write(f"{engine.replica.address}\n")
            sys.stdout.flush()
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
