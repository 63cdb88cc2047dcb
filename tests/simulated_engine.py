"""An engine without a model, for tests of what talks to engines: real gRPC, a real lease, made-up tokens.

It serves GenerateService, answers with ids 1, 2, 3, ..., and counts what happens to it. In a process of its own, to be
killed: `python -m tests.simulated_engine --url=nats://... --run=NAME --replica-id=ID [--delay-s=1]`; it prints its
address once it serves.
"""

import argparse
import asyncio
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from google.protobuf import json_format

from penstock import log
from penstock.bus import leases
from penstock.bus.connection import Bus, connect
from penstock.config import BusConfig, LogConfig
from penstock.errors import NotReadyError, PenstockError
from penstock.rpc.server import RpcServer
from penstock.v1 import common_pb2, generate_pb2, generate_pb2_grpc

_NAME = "penstock.v1.GenerateService"


class SimulatedEngine(generate_pb2_grpc.GenerateServiceServicer):
    """One engine; change `delay_s`, `error` and, with `update`, its lease while it runs."""

    def __init__(
        self,
        bus: Bus,
        *,
        replica_id: str = "",
        policy_version: int = 0,
        state: int = common_pb2.REPLICA_STATE_READY,
        max_running: int = 8,
        delay_s: float = 0.0,
        error: PenstockError | None = None,
        port: int = 0,
    ) -> None:
        self.replica = common_pb2.Replica(
            replica_id=replica_id or f"engine-{uuid.uuid4().hex[:8]}",
            role=common_pb2.REPLICA_ROLE_UNIFIED,
            state=state,
            policy_version=policy_version,
            max_running=max_running,
        )
        self.delay_s = delay_s
        self.error = error
        self.num_calls = 0
        self.num_answered = 0
        self.num_cancelled = 0
        self.num_running = 0
        self.requests: list[generate_pb2.GenerateRequest] = []
        self.deadlines_s: list[float | None] = []
        self._bus = bus
        self._port = port
        self._server: RpcServer | None = None
        self._lease: leases.Lease | None = None

    @property
    def replica_id(self) -> str:
        """Its name."""
        return self.replica.replica_id

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> generate_pb2.GenerateResponse:
        """Wait for `delay_s`, then fail with `error` or answer."""
        self.num_calls += 1
        self.num_running += 1
        self.requests.append(request)
        self.deadlines_s.append(context.time_remaining())
        try:
            if request.min_policy_version > self.replica.policy_version:
                raise NotReadyError(f"policy version {self.replica.policy_version} < {request.min_policy_version}")
            await asyncio.sleep(self.delay_s)
            if self.error is not None:
                raise self.error
            self.num_answered += 1
            return self._answer(request)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

    def _answer(self, request: generate_pb2.GenerateRequest) -> generate_pb2.GenerateResponse:
        num_tokens = request.sampling.max_new_tokens or 4
        return generate_pb2.GenerateResponse(
            output_ids=range(1, num_tokens + 1),
            logprobs=[-1.0] * num_tokens,
            version_spans=[
                common_pb2.VersionSpan(num_tokens=num_tokens, policy_version=self.replica.policy_version),
            ],
            finish_reason=generate_pb2.FINISH_REASON_LENGTH,
            usage=generate_pb2.Usage(num_prompt_tokens=len(request.input_ids), num_output_tokens=num_tokens),
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

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Serve and hold the lease during the context."""
        self._server = RpcServer(host="127.0.0.1", port=self._port)
        self._server.add(generate_pb2_grpc.add_GenerateServiceServicer_to_server, self, _NAME)
        await self._server.start()
        self.replica.address = self._server.address
        ttl_s = self._bus.config.lease_ttl_s
        bucket = await self._bus.bucket("replicas", ttl_s=ttl_s)
        try:
            async with leases.held(bucket, self.replica_id, self._describe, ttl_s=ttl_s) as self._lease:
                await self._lease.renew()
                yield self
        finally:
            await self._server.drain(0.0)

    def _describe(self) -> bytes:
        return json_format.MessageToJson(self.replica, preserving_proto_field_name=True).encode()


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--replica-id", required=True)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--lease-ttl-s", type=float, default=1.0)
    options = parser.parse_args()
    log.configure(LogConfig(), service="simulated-engine")  # to standard error: standard output is for the address
    async with connect(BusConfig(url=options.url, lease_ttl_s=options.lease_ttl_s), run=options.run) as bus:
        engine = SimulatedEngine(bus, replica_id=options.replica_id, delay_s=options.delay_s)
        async with engine.running():
            sys.stdout.write(f"{engine.replica.address}\n")
            sys.stdout.flush()
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
