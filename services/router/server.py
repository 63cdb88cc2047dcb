"""The router's server: takes a Generate call, finds a replica, and plays it again elsewhere when the replica fails.

Generate is unary, so that a failed call has delivered no token and may be repeated. Requests and answers pass through
as the bytes that they came as.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from penstock.bus.connection import Bus, connect
from penstock.errors import (
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    UnavailableError,
)
from penstock.rpc.channel import call
from penstock.rpc.server import RpcServer, deadline_s, service_name
from penstock.v1 import generate_pb2, router_pb2, router_pb2_grpc
from services.router.config import RouterConfig
from services.router.policy import Affinity, NoReplica, choose, find_obstacle
from services.router.pool import Member, Pool, open_pool

if TYPE_CHECKING:
    from services.recipe import ServiceRecipe

log = structlog.get_logger()

_CONNECT_TIMEOUT_S = 2.0
_TRY_AGAIN_S = 0.25
"""A replica that refused a request is offered it again after so long, if nobody else takes it."""
_TIME_TO_ANSWER_S = 0.2
"""Waiting ends so long before the caller's deadline, so that the caller still hears why."""


class _UnreachableError(UnavailableError):
    """No connection: the replica never had the request."""


class GenerateServicer:
    """GenerateService over a pool; a caller cannot tell it from one engine."""

    def __init__(self, config: RouterConfig, pool: Pool, affinity: Affinity) -> None:
        """Route over `pool`."""
        self._config = config
        self._pool = pool
        self._affinity = affinity

    async def Generate(self, raw: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:  # noqa: N802 - gRPC's name
        """Play one turn on a replica; bytes in, bytes out."""
        deadline = time.monotonic() + deadline_s(context, default=self._config.max_call_s)
        try:
            request = generate_pb2.GenerateRequest.FromString(raw)
        except DecodeError:
            raise InvalidRequestError(f"{len(raw)} bytes are no GenerateRequest") from None
        return await self._route(request, raw, deadline)

    async def _route(self, request: generate_pb2.GenerateRequest, raw: bytes, deadline: float) -> bytes:
        num_tries, waited_s = 0, 0.0
        may_wait_s = min(self._config.wait_for_replica_s, _seconds_until(deadline) - _TIME_TO_ANSWER_S)
        refused_until: dict[str, float] = {}
        last_error: PenstockError | None = None
        while True:
            now = time.monotonic()
            excluded = {replica_id for replica_id, until in refused_until.items() if until > now}
            chosen = self._choose(request, excluded)
            if isinstance(chosen, NoReplica):
                if waited_s >= may_wait_s:
                    raise _gave_up(chosen, waited_s, last_error)
                await self._pool.changed(min(_TRY_AGAIN_S, may_wait_s - waited_s))
                waited_s += time.monotonic() - now
                continue
            try:
                with self._pool.engaged(chosen) as member:
                    return await self._try(member, raw, deadline)
            except (UnavailableError, OverloadedError, NotReadyError) as error:
                last_error = error
                refused_until[chosen] = time.monotonic() + _TRY_AGAIN_S
                log.warning("generate.retried", request=request.request_id, replica=chosen, error=str(error))
                # Unreachable replicas never had the request, and full ones turned it away: neither may be its fault.
                num_tries += isinstance(error, UnavailableError) and not isinstance(error, _UnreachableError)
                if num_tries >= self._config.max_tries:
                    raise UnavailableError(f"given up after {num_tries} replicas failed; the last: {error}") from None

    def _choose(self, request: generate_pb2.GenerateRequest, excluded: set[str]) -> str | NoReplica:
        _, min_version = self._pool.published()
        chosen = choose(
            self._pool.candidates(),
            self._affinity,
            session_id=request.session_id,
            min_version=max(min_version, request.min_policy_version),
            excluded=excluded,
        )
        if isinstance(chosen, str):
            self._affinity.bind(request.session_id, chosen)
        return chosen

    async def _try(self, member: Member, raw: bytes, deadline: float) -> bytes:
        if not await member.connected(min(_CONNECT_TIMEOUT_S, _seconds_until(deadline))):
            member.set_aside()
            raise _UnreachableError(f"{member.name}: no connection")
        try:
            return await call(member.generate(raw, timeout_s=_seconds_until(deadline)), peer=member.name)
        except UnavailableError:
            member.set_aside()
            raise


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """RouterService: tells what the router sees."""

    def __init__(self, pool: Pool) -> None:
        """Tell of `pool`."""
        self._pool = pool

    async def ListReplicas(  # noqa: N802 - gRPC's name
        self,
        request: router_pb2.ListReplicasRequest,
        context: grpc.aio.ServicerContext[router_pb2.ListReplicasRequest, router_pb2.ListReplicasResponse],
    ) -> router_pb2.ListReplicasResponse:
        """The replicas that are alive, and which may be given requests."""
        version, min_version = self._pool.published()
        response = router_pb2.ListReplicasResponse(published_version=version, min_policy_version=min_version)
        for candidate in self._pool.candidates():
            obstacle = find_obstacle(candidate, min_version)
            response.replicas.add(
                replica=candidate.replica,
                routable=obstacle is None,
                unroutable_reason="" if obstacle is None else obstacle.value,
                num_in_flight=candidate.num_in_flight,
            )
        return response


@asynccontextmanager
async def routing(config: RouterConfig, bus: Bus) -> AsyncIterator[RpcServer]:
    """Run a router during the context; it drains at the end."""
    async with open_pool(bus) as pool:
        server = RpcServer(host=config.host, port=config.port)
        generate_name = service_name(generate_pb2.DESCRIPTOR, "GenerateService")
        server.add(_register_generate, GenerateServicer(config, pool, Affinity(config.max_sessions)), generate_name)
        router_name = service_name(router_pb2.DESCRIPTOR, "RouterService")
        server.add(router_pb2_grpc.add_RouterServiceServicer_to_server, RouterServicer(pool), router_name)
        await server.start()
        try:
            yield server
        finally:
            await server.drain(config.grace_s)


async def serve(recipe: "ServiceRecipe", stop: asyncio.Event) -> None:
    """Run the router of `recipe` until `stop`."""
    async with connect(recipe.bus, run=recipe.run.name) as bus, routing(recipe.router, bus):
        await stop.wait()


def _register_generate(servicer: GenerateServicer, server: grpc.aio.Server) -> None:
    """What the generated add_GenerateServiceServicer_to_server does, but without reading and writing the messages."""
    handlers = {"Generate": grpc.unary_unary_rpc_method_handler(servicer.Generate)}
    name = service_name(generate_pb2.DESCRIPTOR, "GenerateService")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


def _gave_up(why: NoReplica, waited_s: float, last_error: PenstockError | None) -> PenstockError:
    kind = OverloadedError if isinstance(last_error, OverloadedError) else UnavailableError
    last = f"; the last refusal: {last_error}" if last_error is not None else ""
    return kind(f"no replica could take the request within {waited_s:.1f} s: {why}{last}")


def _seconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
