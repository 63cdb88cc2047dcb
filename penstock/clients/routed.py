"""Generation without a hop: the router assigns a slot, and the client calls that replica itself.

Tokens bypass the router, which saves its CPU and memory; latency stays about the same (docs/benchmarks.md). Invariants:
a turn looks as if one replica had answered it, as with the router's own Generate; a slot from the router is always
released, whatever happens.
"""

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc.aio
import structlog

from penstock.clients.base import Client
from penstock.clients.pd_pair import reports_prompt
from penstock.clients.resumable import ResumableTurn
from penstock.clients.stream_attempt import LostReplicaError, UnreachableError, seconds_until
from penstock.clients.turn import RetryBudget, run_turn
from penstock.errors import (
    DeadlineError,
    InvalidRequestError,
    MissingImageError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    PromptTooLongError,
)
from penstock.rpc.channel import call, connect
from penstock.runtime.security import Security
from penstock.v1 import generate_pb2, generate_pb2_grpc, router_pb2, router_pb2_grpc

log = structlog.get_logger()

ResultT = TypeVar("ResultT")

_CHUNK_TOKENS = 64
"""Chunk size in tokens if the caller wants the whole turn: the most that a dying replica costs."""
_PREFIX_TOKENS = 1024
"""Prompt ids that a prefix-aware router gets."""
_MAX_CHANNELS = 256
_RELEASE_TIMEOUT_S = 5.0
_LEAVE_TIMEOUT_S = 5.0


class RoutedGenerateClient(Client):
    """Generation by a pool, like `GenerateClient` at its router, but with tokens that bypass the router."""

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        """Prepare a channel to the router at `address` (host:port); channels to replicas are made when needed."""
        super().__init__(address, security=security)
        self._slots = _Slots(router_pb2_grpc.RouterServiceStub(self._channel), f"router at {address}", security)

    async def close(self) -> None:
        """Release all slots and close all channels; running calls are cancelled."""
        await self._slots.close()
        await super().close()

    async def generate(
        self, request: generate_pb2.GenerateRequest, *, timeout_s: float, retry_until: float | None = None
    ) -> generate_pb2.GenerateResponse:
        """Generate one turn; a replica that fails costs only the tokens that it had not delivered.

        An answer with `sampling.constraint` starts over instead: another replica cannot continue it.

        Args:
            request: The turn.
            timeout_s: Deadline of one try; a try continues from the tokens of earlier ones.
            retry_until: Time of `time.monotonic()` until which a call that may succeed later is retried.

        Raises:
            InvalidRequestError: the request can never succeed.
            PoisonError: too many replicas failed.
            UnavailableError: no replica could take it.
            OverloadedError: too many calls wait for a slot.
            DeadlineError: a try exceeded its deadline.
        """
        chunked = generate_pb2.GenerateRequest()
        chunked.CopyFrom(request)
        chunked.chunk_tokens = _CHUNK_TOKENS
        turn, budget = ResumableTurn(chunked, may_restart=True), RetryBudget()  # shared by all attempts

        async def attempt(number: int, remaining_s: float) -> generate_pb2.GenerateResponse:
            if not turn.is_finished:
                async with contextlib.aclosing(self._run(request, turn, budget, remaining_s)) as chunks:
                    async for _ in chunks:
                        pass
            return turn.response()

        return await self._retried(attempt, timeout_s=timeout_s, retry_until=retry_until)

    async def stream(
        self, request: generate_pb2.GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[generate_pb2.GenerateChunk, None]:
        """Generate one turn and yield its chunks. To leave early, close the generator with `contextlib.aclosing`.

        Args:
            request: The turn.
            timeout_s: Deadline of the whole turn.

        Raises:
            InvalidRequestError: the request can never succeed.
            PoisonError: too many replicas failed.
            UnavailableError: no replica could take it, or the rest of it.
            OverloadedError: too many calls wait for a slot.
            DeadlineError: it exceeded its deadline.
        """
        async with contextlib.aclosing(self._run(request, ResumableTurn(request), RetryBudget(), timeout_s)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _run(
        self, request: generate_pb2.GenerateRequest, turn: ResumableTurn, budget: RetryBudget, timeout_s: float
    ) -> AsyncGenerator[generate_pb2.GenerateChunk, None]:
        deadline = time.monotonic() + timeout_s
        return run_turn(_RouteSource(self._slots, request, deadline), turn, budget=budget, deadline=deadline)


class _ReplicaPeer:
    """A replica to call (`penstock.clients.stream_attempt.Peer`)."""

    def __init__(self, replica_id: str, address: str, security: Security | None) -> None:
        self.name = f"replica {replica_id} at {address}"
        self.address = address
        self.channel = connect(address, security)
        self.num_slots = 0
        """Slots taken there; its channel stays open while there are any."""
        self._stub = generate_pb2_grpc.GenerateServiceStub(self.channel)

    def generate(
        self, request: generate_pb2.GenerateRequest, *, timeout_s: float
    ) -> Awaitable[generate_pb2.GenerateResponse]:
        return self._stub.Generate(request, timeout=timeout_s)

    def generate_stream(
        self, request: generate_pb2.GenerateRequest, *, timeout_s: float
    ) -> "grpc.aio.UnaryStreamCall[generate_pb2.GenerateRequest, generate_pb2.GenerateChunk]":
        return self._stub.GenerateStream(request, timeout=timeout_s)


class _Route:
    """One slot from the router; `release` it once."""

    def __init__(self, route_id: str, replica_id: str, peer: _ReplicaPeer) -> None:
        self.route_id = route_id
        self.replica_id = replica_id
        self.peer = peer
        self.outcome = router_pb2.ROUTE_OUTCOME_UNSPECIFIED
        """Outcome of the call, as far as this replica is concerned."""
        peer.num_slots += 1


class _RouteSlot:
    """A slot for one attempt (`penstock.clients.turn.AttemptSlot`): one route, or both of a PD pair."""

    def __init__(
        self,
        response: router_pb2.RouteResponse,
        route: _Route,
        prefill: _Route | None,
        release: Callable[[_Route], asyncio.Future[bool]],
    ) -> None:
        self.max_tokens = response.max_tokens
        self.bootstrap = response.bootstrap if prefill is not None else None
        self.peer = route.peer
        self.prefill_peer = None if prefill is None else prefill.peer
        self.culprit = route
        """The route to blame if the attempt fails."""
        self._route = route
        self._prefill = prefill
        self._release = release

    def begin_answer(self) -> None:
        self._route.outcome = router_pb2.ROUTE_OUTCOME_SUCCEEDED

    def hand_over(self) -> None:
        assert self._prefill is not None
        self._prefill.outcome = router_pb2.ROUTE_OUTCOME_SUCCEEDED
        self._release(self._prefill)

    def succeed(self) -> None:
        self._route.outcome = router_pb2.ROUTE_OUTCOME_SUCCEEDED

    async def fail(self, error: PenstockError, *, is_prefill: bool) -> PenstockError:
        if is_prefill and self._prefill is not None:
            self.culprit = self._prefill
        self.culprit.outcome = _outcome_of(error)
        releasing = [self._release(each) for each in self._routes]
        if not any(await asyncio.shield(asyncio.gather(*releasing))):  # before asking for another slot
            return error
        self.culprit.outcome = router_pb2.ROUTE_OUTCOME_REJECTED
        return NotReadyError(f"{error} (a push broke it off)")

    def release(self) -> None:
        for route in self._routes:
            self._release(route)

    @property
    def _routes(self) -> list[_Route]:
        return [each for each in (self._prefill, self._route) if each is not None]


class _RouteSource:
    """Gives out slots for one turn (`penstock.clients.turn.SlotSource`)."""

    def __init__(self, slots: "_Slots", request: generate_pb2.GenerateRequest, deadline: float) -> None:
        self._slots = slots
        self._deadline = deadline
        self._request_id = request.request_id
        self._num_prompt_ids = len(request.input_ids)
        self._routing = router_pb2.RouteRequest(
            session_id=request.session_id,
            group_id=request.group_id,
            min_policy_version=request.min_policy_version,
            exact_policy_version=request.exact_policy_version,
            prefix_ids=request.input_ids[:_PREFIX_TOKENS],
            reports_prompt=reports_prompt(request),
        )
        self._too_long: PromptTooLongError | None = None
        """The error of the last replica that was too small."""

    async def take(self, num_tokens: int) -> _RouteSlot:
        self._routing.ttl_s = seconds_until(self._deadline)
        self._routing.num_prompt_ids = max(self._routing.num_prompt_ids, self._num_prompt_ids + num_tokens)
        try:
            return await self._slots.take(self._routing)
        except PromptTooLongError as error:
            raise self._too_long or error from None  # the replica's error has counted the images

    def find_larger(self, slot: _RouteSlot) -> bool:
        del self._routing.excluded_replica_ids[:]  # the router would wait for a replica as large as those
        self._routing.num_prompt_ids = max(self._routing.num_prompt_ids, slot.max_tokens)
        return slot.max_tokens > 0  # if no replica is larger, the router says so

    def note_failure(self, slot: _RouteSlot, error: PenstockError, *, has_progressed: bool) -> None:
        if isinstance(error, PromptTooLongError):
            self._too_long = error
        is_broken = isinstance(error, LostReplicaError) and not isinstance(error, UnreachableError)
        if is_broken or slot.culprit.outcome == router_pb2.ROUTE_OUTCOME_FAILED:  # the router avoids others itself
            failed_id = slot.culprit.replica_id
            log.warning("generate.retried", request=self._request_id, replica_id=failed_id, error=str(error))
            self._routing.excluded_replica_ids.append(failed_id)


class _Slots:
    """The slots that a client has taken, and the channels to their replicas."""

    def __init__(self, stub: "router_pb2_grpc.RouterServiceAsyncStub", router: str, security: Security | None) -> None:
        self._stub = stub
        self._router = router
        self._security = security
        self._peers: collections.OrderedDict[str, _ReplicaPeer] = collections.OrderedDict()
        self._kept: set[_Route] = set()
        self._working: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        for route in list(self._kept):
            self._release(route)
        while self._working:
            await asyncio.wait(self._working)
        for peer in self._peers.values():
            await peer.channel.close(None)

    async def take(self, routing: router_pb2.RouteRequest) -> _RouteSlot:
        """Ask the router for a slot."""
        asking = asyncio.ensure_future(call(self._stub.Route(routing, timeout=routing.ttl_s), peer=self._router))
        try:
            response = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._in_background(self._abandon(asking))
            raise
        route = self._keep(response.route_id, response.replica_id, response.address)
        prefill = None
        if response.HasField("prefill"):
            described = response.prefill
            prefill = self._keep(described.route_id, described.replica_id, described.address)
        return _RouteSlot(response, route, prefill, self._release)

    async def _abandon(self, asking: asyncio.Future[router_pb2.RouteResponse]) -> None:
        """Release a slot that the router may still assign; cancelling the call would leave it taken."""
        with contextlib.suppress(PenstockError, TimeoutError):
            response = await asyncio.wait_for(asking, _LEAVE_TIMEOUT_S)
            for route_id in filter(None, (response.prefill.route_id, response.route_id)):
                await self._send_release(route_id, router_pb2.ROUTE_OUTCOME_UNSPECIFIED)

    def _keep(self, route_id: str, replica_id: str, address: str) -> _Route:
        route = _Route(route_id, replica_id, self._peer(replica_id, address))
        self._kept.add(route)
        return route

    def _release(self, route: _Route) -> asyncio.Future[bool]:
        """Release the slot in the background, once; the result says whether a push had interrupted the call.

        If that fails, the router's own time limit ends the slot.
        """
        if route not in self._kept:
            done = asyncio.get_running_loop().create_future()
            done.set_result(False)
            return done
        self._kept.remove(route)
        route.peer.num_slots -= 1
        return self._in_background(self._send_release(route.route_id, route.outcome))

    async def _send_release(self, route_id: str, outcome: router_pb2.RouteOutcome.ValueType) -> bool:
        request = router_pb2.ReleaseRouteRequest(route_id=route_id, outcome=outcome)
        try:
            return (await self._stub.ReleaseRoute(request, timeout=_RELEASE_TIMEOUT_S)).was_pushed
        except grpc.aio.AioRpcError as failure:
            log.warning("route.unreleased", route=route_id, error=failure.details())
            return False

    def _peer(self, replica_id: str, address: str) -> _ReplicaPeer:
        """Return the replica at this address; beyond `_MAX_CHANNELS`, close the least recently used idle channel."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _ReplicaPeer(replica_id, address, self._security)
        self._peers.move_to_end(address)
        if len(self._peers) > _MAX_CHANNELS:
            idle = next((each for each in self._peers.values() if each.num_slots == 0 and each is not peer), None)
            if idle is not None:
                del self._peers[idle.address]
                self._in_background(idle.channel.close(None))
        return peer

    def _in_background(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return task


def _outcome_of(error: PenstockError) -> router_pb2.RouteOutcome.ValueType:
    if isinstance(error, OverloadedError | NotReadyError):
        return router_pb2.ROUTE_OUTCOME_REJECTED
    if isinstance(error, InvalidRequestError | MissingImageError):
        return router_pb2.ROUTE_OUTCOME_SUCCEEDED
    if isinstance(error, DeadlineError):
        return router_pb2.ROUTE_OUTCOME_UNSPECIFIED
    if isinstance(error, LostReplicaError):
        return router_pb2.ROUTE_OUTCOME_UNREACHABLE
    return router_pb2.ROUTE_OUTCOME_FAILED
