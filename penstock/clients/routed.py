"""Generation without a hop: the router names a replica, and the client talks to that replica itself.

Invariants: a turn looks as if one replica had played it, as with the router's own Generate; a place that the router
gave is given back, whatever happens.
"""

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import grpc.aio
import structlog

from penstock.clients.base import Client
from penstock.clients.pd_pair import PDPeer, PDPeerError, stream_pair
from penstock.clients.resumable import ResumableTurn
from penstock.clients.stream_attempt import RetryBudget, UnreachableError, seconds_until, stream_attempt
from penstock.errors import (
    DeadlineError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    UnavailableError,
)
from penstock.rpc.channel import call, connect
from penstock.runtime.security import Security
from penstock.v1 import generate_pb2, generate_pb2_grpc, router_pb2, router_pb2_grpc

log = structlog.get_logger()

ResultT = TypeVar("ResultT")

_CHUNK_TOKENS = 64
"""Where the caller wants the whole turn, it comes in chunks of so many tokens: what a replica that dies costs."""
_PREFIX_TOKENS = 1024
"""How much of the prompt a prefix-aware router is told."""
_MAX_CHANNELS = 256
_RELEASE_TIMEOUT_S = 5.0
_LEAVE_TIMEOUT_S = 5.0


class _Replica:
    """A channel to a replica."""

    def __init__(self, address: str, security: Security | None) -> None:
        self.address = address
        self.channel = connect(address, security)
        self.stub = generate_pb2_grpc.GenerateServiceStub(self.channel)
        self.num_calls = 0


class _Place:
    """A place that the router gave, with the replica to talk to."""

    def __init__(self, route_id: str, replica_id: str, replica: _Replica) -> None:
        self.route_id = route_id
        self.replica_id = replica_id
        self.replica = replica
        self.half = PDPeer(name=f"replica {replica_id} at {replica.address}", channel=replica.channel)
        self.outcome = router_pb2.ROUTE_OUTCOME_UNSPECIFIED
        """What came of the call, as far as this replica is concerned."""
        replica.num_calls += 1


class _Leg:
    """The place of a leg, or both of a pair."""

    def __init__(self, place: _Place, prefill: _Place | None) -> None:
        self.place = place
        self.prefill = prefill
        self.culprit = place
        """Whose failure it is if the leg fails."""

    def blame(self, half: PDPeer) -> None:
        if self.prefill is not None and self.prefill.half is half:
            self.culprit = self.prefill


class RoutedGenerateClient(Client):
    """Generation by a pool, as `GenerateClient` at its router, but no token goes through the router."""

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        """Prepare a channel to the router at `address` (host:port); those to replicas are made as they are named."""
        super().__init__(address, security=security)
        self._security = security
        self._stub = router_pb2_grpc.RouterServiceStub(self._channel)
        self._replicas: collections.OrderedDict[str, _Replica] = collections.OrderedDict()
        self._kept: set[_Place] = set()
        self._working: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Give all places back, and close all channels; calls that run are cancelled."""
        for place in list(self._kept):
            self._release(place)
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
        turn = ResumableTurn(chunked)

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
        async with contextlib.aclosing(self._play(request, ResumableTurn(request), timeout_s)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _play(
        self, request: generate_pb2.GenerateRequest, turn: ResumableTurn, timeout_s: float
    ) -> AsyncGenerator[generate_pb2.GenerateChunk, None]:
        """What is left of the turn, from one replica after another."""
        deadline = time.monotonic() + timeout_s
        routing = router_pb2.RouteRequest(
            session_id=request.session_id,
            min_policy_version=request.min_policy_version,
            prefix_ids=request.input_ids[:_PREFIX_TOKENS],
        )
        tries = RetryBudget()
        while not turn.is_finished:
            routing.ttl_s = seconds_until(deadline)
            routing.num_prompt_ids = max(routing.num_prompt_ids, len(request.input_ids) + turn.num_tokens)
            route, num_before = await self._take_place(routing), turn.num_tokens
            leg = self._leg(route)
            try:
                async with contextlib.aclosing(self._play_leg(leg, route.bootstrap, turn, deadline)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except InvalidRequestError:
                if turn.num_tokens == 0 or route.max_tokens == 0:
                    raise
                routing.num_prompt_ids = route.max_tokens  # others took it: one that is larger may
            except PenstockError as error:
                tries.count(error, has_progressed=turn.num_tokens > num_before)
                if leg.culprit.outcome == router_pb2.ROUTE_OUTCOME_FAILED:  # else the router leaves it alone by itself
                    failed_id = leg.culprit.replica_id
                    log.warning("generate.retried", request=request.request_id, replica=failed_id, error=str(error))
                    routing.excluded_replica_ids.append(failed_id)

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
            route = await asyncio.wait_for(asking, _LEAVE_TIMEOUT_S)
            for route_id in filter(None, (route.prefill.route_id, route.route_id)):
                await self._release_route(route_id, router_pb2.ROUTE_OUTCOME_UNSPECIFIED)

    async def _play_leg(
        self, leg: _Leg, bootstrap: generate_pb2.Bootstrap, turn: ResumableTurn, deadline: float
    ) -> AsyncGenerator[generate_pb2.GenerateChunk, None]:
        """What a replica or a pair delivers. Unless the turn is whole then, it fails. Gives the places back."""
        place, has_begun = leg.place, False
        error: PenstockError | None = None
        try:
            async with contextlib.aclosing(self._chunks(leg, bootstrap, turn, deadline)) as chunks:
                async for chunk in chunks:
                    turn.relay(chunk)
                    if not has_begun:
                        has_begun, place.outcome = True, router_pb2.ROUTE_OUTCOME_SUCCEEDED
                    yield chunk
            if not turn.is_finished:
                error = UnavailableError(f"{place.half.name}: its stream ended before its last chunk")
        except PDPeerError as failure:
            leg.blame(failure.half)
            error = failure.error
        except PenstockError as failure:
            error = failure
        finally:
            if error is not None and not turn.is_finished:  # a break after the last token is none
                leg.culprit.outcome = _outcome_of(error)
            releasing = [self._release(each) for each in (leg.prefill, place) if each is not None]
        if error is not None and not turn.is_finished:
            if any(await asyncio.shield(asyncio.gather(*releasing))):  # before asking for another
                leg.culprit.outcome = router_pb2.ROUTE_OUTCOME_REFUSED
                error = NotReadyError(f"{error} (broken off by a push)")
            raise error from None

    def _chunks(
        self, leg: _Leg, bootstrap: generate_pb2.Bootstrap, turn: ResumableTurn, deadline: float
    ) -> AsyncGenerator[generate_pb2.GenerateChunk, None]:
        """What the leg's replica, or its pair, streams."""
        request, stub, prefill = turn.remaining(), leg.place.replica.stub, leg.prefill
        if prefill is None:
            half = leg.place.half
            return stream_attempt(
                half.channel,
                lambda timeout_s: stub.GenerateStream(request, timeout=timeout_s),
                name=half.name,
                is_last=lambda _: turn.is_finished,
                deadline=deadline,
            )
        request.bootstrap.CopyFrom(bootstrap)

        def hand_over() -> None:
            prefill.outcome = router_pb2.ROUTE_OUTCOME_SUCCEEDED
            self._release(prefill)

        return stream_pair(
            prefill.half,
            leg.place.half,
            start_prefill=lambda timeout_s: prefill.replica.stub.Generate(request, timeout=timeout_s),
            start_decode=lambda timeout_s: stub.GenerateStream(request, timeout=timeout_s),
            on_handover=hand_over,
            is_last=lambda _: turn.is_finished,
            deadline=deadline,
        )

    def _leg(self, route: router_pb2.RouteResponse) -> _Leg:
        """The replicas that the route names."""
        place = self._keep(route.route_id, route.replica_id, route.address)
        if not route.HasField("prefill"):
            return _Leg(place, None)
        prefill = route.prefill
        return _Leg(place, self._keep(prefill.route_id, prefill.replica_id, prefill.address))

    def _keep(self, route_id: str, replica_id: str, address: str) -> _Place:
        place = _Place(route_id, replica_id, self._replica(address))
        self._kept.add(place)
        return place

    def _release(self, place: _Place) -> asyncio.Future[bool]:
        """Give the place back, in the background and once; whether a push had broken the call off.

        Where it fails, the router's own limit of time ends the place.
        """
        if place not in self._kept:
            done = asyncio.get_running_loop().create_future()
            done.set_result(False)
            return done
        self._kept.remove(place)
        place.replica.num_calls -= 1
        return self._in_background(self._release_route(place.route_id, place.outcome))

    async def _release_route(self, route_id: str, outcome: router_pb2.RouteOutcome.ValueType) -> bool:
        request = router_pb2.ReleaseRouteRequest(route_id=route_id, outcome=outcome)
        with contextlib.suppress(grpc.aio.AioRpcError):
            return bool((await self._stub.ReleaseRoute(request, timeout=_RELEASE_TIMEOUT_S)).was_pushed)
        return False

    def _replica(self, address: str) -> _Replica:
        replica = self._replicas.pop(address, None) or _Replica(address, self._security)
        self._replicas[address] = replica  # the one used last
        if len(self._replicas) > _MAX_CHANNELS:
            idle = next((each for each in self._replicas.values() if each.num_calls == 0 and each is not replica), None)
            if idle is not None:
                del self._replicas[idle.address]
                self._in_background(idle.channel.close(None))
        return replica

    def _in_background(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
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
    if isinstance(error, UnreachableError):
        return router_pb2.ROUTE_OUTCOME_UNREACHABLE
    return router_pb2.ROUTE_OUTCOME_FAILED
