"""RouterService: the router's view of replicas, slots for clients that bypass it, and draining."""

import time
from typing import Any

import grpc.aio

from penstock.errors import InvalidRequestError
from penstock.rpc.channel import call, connect
from penstock.rpc.server import deadline_s
from penstock.runtime.security import Security
from penstock.v1 import rollout_pb2, rollout_pb2_grpc, router_pb2, router_pb2_grpc
from services.router.balancing import Query, hash_blocks
from services.router.pool import Pool
from services.router.routes import Routes
from services.router.slots.breaker import BreakerState
from services.router.slots.slot import Slot
from services.router.slots.slot_pool import SlotPool
from services.router.slots.wait_queue import Ticket
from services.router.tuning import Tuning

_BREAKER_STATES = {
    BreakerState.CLOSED: router_pb2.BREAKER_STATE_CLOSED,
    BreakerState.OPEN: router_pb2.BREAKER_STATE_OPEN,
    BreakerState.HALF_OPEN: router_pb2.BREAKER_STATE_HALF_OPEN,
}


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """The router's own service."""

    def __init__(
        self,
        pool: Pool,
        slots: SlotPool,
        routes: Routes,
        *,
        tuning: Tuning,
        security: Security,
    ) -> None:
        """Report `pool`, and give out `slots` as `routes`; calls to replicas carry `security`."""
        self._pool = pool
        self._slots = slots
        self._routes = routes
        self._tuning = tuning
        self._security = security

    async def ListReplicas(  # noqa: N802 - gRPC's name
        self,
        request: router_pb2.ListReplicasRequest,
        context: grpc.aio.ServicerContext[router_pb2.ListReplicasRequest, router_pb2.ListReplicasResponse],
    ) -> router_pb2.ListReplicasResponse:
        """List the replicas that hold a lease, and which of them can take calls."""
        response = router_pb2.ListReplicasResponse(
            published_version=self._pool.published_version,
            min_policy_version=self._pool.min_version,
            num_waiting=self._slots.num_waiting,
            num_waiting_bytes=self._slots.num_waiting_bytes,
        )
        query, now = Query(min_version=self._pool.min_version), time.monotonic()
        for _, replica in sorted(self._slots.replicas.items()):
            status = replica.status
            reason = self._slots.view.find_reason(status, query, now)
            response.replicas.add(
                replica=replica.lease,
                routable=reason is None,
                unroutable_reason="" if reason is None else reason.value,
                num_in_flight=status.num_in_flight,
                limit=status.max_in_flight,
                load=status.load,
                breaker=_BREAKER_STATES[replica.breaker_state],
            )
        return response

    async def Route(  # noqa: N802 - gRPC's name
        self,
        request: router_pb2.RouteRequest,
        context: grpc.aio.ServicerContext[router_pb2.RouteRequest, router_pb2.RouteResponse],
    ) -> router_pb2.RouteResponse:
        """Choose a replica or a PD pair, and reserve a slot there."""
        if not request.ttl_s >= 0:
            raise InvalidRequestError(f"ttl_s = {request.ttl_s} is not a duration; send seconds, or 0")
        query = Query(
            session_id=request.session_id,
            group_id=request.group_id,
            min_version=request.min_policy_version,
            exact_version=request.exact_policy_version,
            reports_prompt=request.reports_prompt,
            excluded=frozenset(request.excluded_replica_ids),
            blocks=hash_blocks(request.prefix_ids) if self._slots.balancer.reads_blocks else (),
            num_tokens=request.num_prompt_ids + 1 if request.num_prompt_ids else 0,
        )
        ttl_s = min(request.ttl_s or self._tuning.route_ttl_s, self._tuning.route_ttl_s)
        deadline = time.monotonic() + self._deadline_s(context)
        # The client counts the failures of its turn, and loses the count with this call.
        is_patient = bool(query.excluded) and not self._slots.is_too_long(query)
        ticket = Ticket(query=query, deadline=deadline, size_bytes=request.ByteSize(), is_patient=is_patient)
        slot = await self._slots.take(ticket)
        max_tokens, prefill = slot.max_tokens, slot.split()
        return router_pb2.RouteResponse(
            route_id=self._routes.open(slot, ttl_s=ttl_s),
            replica_id=slot.replica_id,
            address=slot.peer.address,
            prefill=None if prefill is None else self._open_prefill(prefill, ttl_s=ttl_s),
            bootstrap=slot.bootstrap,
            max_tokens=max_tokens,
        )

    def _open_prefill(self, slot: Slot, *, ttl_s: float) -> router_pb2.PrefillRoute:
        route_id = self._routes.open(slot, ttl_s=ttl_s)
        return router_pb2.PrefillRoute(route_id=route_id, replica_id=slot.replica_id, address=slot.peer.address)

    async def ReleaseRoute(  # noqa: N802 - gRPC's name
        self,
        request: router_pb2.ReleaseRouteRequest,
        context: grpc.aio.ServicerContext[router_pb2.ReleaseRouteRequest, router_pb2.ReleaseRouteResponse],
    ) -> router_pb2.ReleaseRouteResponse:
        """Release the slot."""
        return await self._routes.release(request.route_id, request.outcome)

    async def DrainReplica(  # noqa: N802 - gRPC's name
        self,
        request: router_pb2.RouterServiceDrainReplicaRequest,
        context: grpc.aio.ServicerContext[
            router_pb2.RouterServiceDrainReplicaRequest, router_pb2.RouterServiceDrainReplicaResponse
        ],
    ) -> router_pb2.RouterServiceDrainReplicaResponse:
        """Drain the replica; all routers learn of it from its lease."""
        lease = self._pool.leases.get(request.replica_id)
        if lease is None:
            known = ", ".join(sorted(self._pool.leases)) or "none"
            raise InvalidRequestError(
                f"replica_id = {request.replica_id!r}: no replica of this id holds a lease; there are: {known}"
            )
        # Not on the slot pool's channel, which closes when the lease ends, as at the end of a replica's life.
        async with connect(lease.address, self._security) as channel:
            pending = rollout_pb2_grpc.RolloutServiceStub(channel).DrainReplica(
                rollout_pb2.DrainReplicaRequest(grace_s=request.grace_s),
                timeout=self._deadline_s(context),
            )
            drained = await call(pending, peer=f"replica {lease.replica_id} at {lease.address}")
        return router_pb2.RouterServiceDrainReplicaResponse(
            num_finished=drained.num_finished, num_handed_over=drained.num_handed_over
        )

    def _deadline_s(self, context: grpc.aio.ServicerContext[Any, Any]) -> float:
        return deadline_s(context, default=self._tuning.max_call_s, most=self._tuning.max_call_s)
