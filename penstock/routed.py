"""Generation without a hop: the router names a replica, and the client talks to that replica itself.

Invariants: a turn looks as if one replica had played it, as with the router's own Generate; a place that the router
gave is given back, whatever happens.
"""

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import grpc.aio
import structlog

from penstock.clients import Client
from penstock.continuation import Continuation
from penstock.errors import (
    DeadlineError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    UnavailableError,
)
from penstock.rpc.channel import call, connect, connected, stream
from penstock.v1 import generate_pb2, generate_pb2_grpc, router_pb2, router_pb2_grpc

log = structlog.get_logger()

_MAX_TRIES = 3
"""A turn that so many replicas in a row took and failed without a token is given up."""
_MAX_FAILURES = 12
"""And one that so many failed at all."""
_CHUNK_TOKENS = 16
"""Where the caller wants the whole turn, it comes in chunks of so many tokens: what a replica that dies costs."""
_PREFIX_TOKENS = 1024
"""How much of the prompt a prefix-aware router is told."""
_MAX_CHANNELS = 256
_CONNECT_TIMEOUT_S = 2.0
_RELEASE_TIMEOUT_S = 5.0
_LEAVE_TIMEOUT_S = 1.0


class _UnreachableError(UnavailableError):
    """No connection: the replica never had the turn."""


class _Replica:
    """A channel to a replica."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = connect(address)
        self.stub = generate_pb2_grpc.GenerateServiceStub(self.channel)
        self.num_calls = 0


class RoutedGenerateClient(Client):
    """Generation by a pool, as `GenerateClient` at its router, but no token goes through the router."""

    def __init__(self, address: str) -> None:
        """Prepare a channel to the router at `address` (host:port); those to replicas are made as they are named."""
        super().__init__(address)
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._replicas: collections.OrderedDict[str, _Replica] = collections.OrderedDict()
        self._working: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Give back what is still to be given back, and close all channels; calls that run are cancelled."""
        while self._working:
            await asyncio.wait(self._working)
        for replica in self._replicas.values():
            await replica.channel.close(None)
        await super().close()

    async def generate(
        self, request: generate_pb2.GenerateRequest, *, timeout_s: float, retry_until: float | None = None
    ) -> generate_pb2.GenerateResponse:
        """Play one turn; a replica that fails costs only the tokens that it had not delivered.

        Args:
            request: The turn.
            timeout_s: Deadline of one attempt; an attempt goes on from what those before it delivered.
            retry_until: Time of `time.monotonic()` until which a call that may succeed later is tried again.

        Raises:
            InvalidRequestError: the request can never succeed.
            UnavailableError: nobody could take it.
            OverloadedError: too many calls wait for a place already.
            DeadlineError: an attempt ran into its deadline.
        """
        chunked = generate_pb2.GenerateRequest()
        chunked.CopyFrom(request)
        chunked.chunk_tokens = _CHUNK_TOKENS
        turn = Continuation(chunked)

        async def attempt(number: int, remaining_s: float) -> generate_pb2.GenerateResponse:
            async with contextlib.aclosing(self._play(request, turn, remaining_s)) as chunks:
                async for _ in chunks:
                    pass
            return turn.response()

        return await self._retried(attempt, timeout_s=timeout_s, retry_until=retry_until)

    async def stream(
        self, request: generate_pb2.GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[generate_pb2.GenerateChunk, None]:
        """Play one turn and give its tokens as they come. To leave early, close the generator: `contextlib.aclosing`.

        Args:
            request: The turn.
            timeout_s: Deadline of all of it.

        Raises:
            InvalidRequestError: the request can never succeed.
            UnavailableError: nobody could take it, or what is left of it.
            OverloadedError: too many calls wait for a place already.
            DeadlineError: it ran into its deadline.
        """
        async with contextlib.aclosing(self._play(request, Continuation(request), timeout_s)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _play(
        self, request: generate_pb2.GenerateRequest, turn: Continuation, timeout_s: float
    ) -> AsyncGenerator[generate_pb2.GenerateChunk, None]:
        """What is left of the turn, from one replica after another."""
        deadline = time.monotonic() + timeout_s
        routing = router_pb2.RouteRequest(
            session_id=request.session_id,
            min_policy_version=request.min_policy_version,
            prefix_ids=request.input_ids[:_PREFIX_TOKENS],
        )
        num_failures = num_in_a_row = 0
        while not turn.is_finished:
            routing.ttl_s = _seconds_until(deadline)
            route, num_before = await self._take_place(routing), turn.num_tokens
            try:
                async with contextlib.aclosing(self._play_leg(route, turn, deadline)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except (_UnreachableError, OverloadedError, NotReadyError):
                continue  # no fault of the turn; the router was told, and leaves that replica alone for a while
            except UnavailableError as error:
                log.warning("generate.retried", request=request.request_id, replica=route.replica_id, error=str(error))
                num_failures += 1
                num_in_a_row = 0 if turn.num_tokens > num_before else num_in_a_row + 1
                if num_in_a_row >= _MAX_TRIES or num_failures >= _MAX_FAILURES:
                    raise UnavailableError(
                        f"given up after {num_failures} replicas failed; the last: {error}"
                    ) from None
                routing.excluded_replica_ids.append(route.replica_id)

    async def _take_place(self, routing: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        pending = call(self._stub.Route(routing, timeout=routing.ttl_s), peer=f"router at {self.address}")
        asking = asyncio.ensure_future(pending)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._in_background(self._leave_place(asking))
            raise

    async def _leave_place(self, asking: asyncio.Future[router_pb2.RouteResponse]) -> None:
        """Nobody wants the place any more. It may be on its way, and a cancelled call would leave it kept by nobody."""
        with contextlib.suppress(PenstockError, TimeoutError):
            self._release(await asyncio.wait_for(asking, _LEAVE_TIMEOUT_S), router_pb2.ROUTE_OUTCOME_UNSPECIFIED)

    async def _play_leg(
        self, route: router_pb2.RouteResponse, turn: Continuation, deadline: float
    ) -> AsyncGenerator[generate_pb2.GenerateChunk, None]:
        """What one replica delivers. Unless the turn is whole then, it fails."""
        replica, peer = self._replica(route.address), f"replica {route.replica_id} at {route.address}"
        replica.num_calls += 1
        has_begun = False
        try:
            if not await connected(replica.channel, min(_CONNECT_TIMEOUT_S, _seconds_until(deadline))):
                if _seconds_until(deadline) == 0.0:
                    raise DeadlineError(f"{peer}: the deadline passed before there was a connection")
                raise _UnreachableError(f"{peer}: no connection")
            pending = replica.stub.GenerateStream(turn.remaining(), timeout=_seconds_until(deadline))
            async with contextlib.aclosing(stream(pending, peer=peer)) as chunks:
                async for chunk in chunks:
                    turn.relay(chunk)
                    has_begun = True
                    yield chunk
            if not turn.is_finished:
                raise UnavailableError(f"{peer}: its stream ended before its last chunk")
        except PenstockError as failure:
            if turn.is_finished:  # a break after the last token is none
                self._release(route, router_pb2.ROUTE_OUTCOME_SUCCEEDED)
                return
            error: PenstockError = failure
            if has_begun and isinstance(failure, OverloadedError | NotReadyError):
                error = UnavailableError(f"{failure}, in mid-answer")  # gRPC says so of streams that it resets
            await asyncio.shield(self._release(route, _outcome_of(error)))  # before asking for another
            raise error from None
        except BaseException:  # the caller has left
            outcome = router_pb2.ROUTE_OUTCOME_SUCCEEDED if has_begun else router_pb2.ROUTE_OUTCOME_UNSPECIFIED
            self._release(route, outcome)
            raise
        else:
            self._release(route, router_pb2.ROUTE_OUTCOME_SUCCEEDED)
        finally:
            replica.num_calls -= 1

    def _release(
        self, route: router_pb2.RouteResponse, outcome: router_pb2.RouteOutcome.ValueType
    ) -> asyncio.Task[None]:
        """Give the place back, in the background. Where that fails, the router's own limit of time ends it."""

        async def release() -> None:
            request = router_pb2.ReleaseRouteRequest(route_id=route.route_id, outcome=outcome)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._stub.ReleaseRoute(request, timeout=_RELEASE_TIMEOUT_S)

        return self._in_background(release())

    def _replica(self, address: str) -> _Replica:
        replica = self._replicas.pop(address, None) or _Replica(address)
        self._replicas[address] = replica  # the one used last
        if len(self._replicas) > _MAX_CHANNELS:
            idle = next((each for each in self._replicas.values() if each.num_calls == 0 and each is not replica), None)
            if idle is not None:
                del self._replicas[idle.address]
                self._in_background(idle.channel.close(None))
        return replica

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return task


def _outcome_of(error: PenstockError) -> router_pb2.RouteOutcome.ValueType:
    if isinstance(error, OverloadedError | NotReadyError):
        return router_pb2.ROUTE_OUTCOME_REFUSED
    if isinstance(error, InvalidRequestError):
        return router_pb2.ROUTE_OUTCOME_SUCCEEDED
    if isinstance(error, DeadlineError):
        return router_pb2.ROUTE_OUTCOME_UNSPECIFIED
    if isinstance(error, _UnreachableError):
        return router_pb2.ROUTE_OUTCOME_UNREACHABLE
    return router_pb2.ROUTE_OUTCOME_FAILED


def _seconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
