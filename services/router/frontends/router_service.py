"""RouterService: what the router sees, places for clients that do without the proxy, and draining."""

import time

import grpc.aio

from penstock.errors import InvalidRequestError
from penstock.rpc.channel import call, connect
from penstock.rpc.server import deadline_s
from penstock.v1 import rollout_pb2, rollout_pb2_grpc, router_pb2, router_pb2_grpc
from services.router.balancing import Query, find_reason, hash_blocks
from services.router.breaker import BreakerState
from services.router.config import RouterConfig
from services.router.pool import Pool
from services.router.routes import Routes
from services.router.slot import Slot
from services.router.slot_pool import SlotPool
from services.router.wait_queue import Ticket

_BREAKER_STATES = {
    BreakerState.CLOSED: router_pb2.BREAKER_STATE_CLOSED,
    BreakerState.OPEN: router_pb2.BREAKER_STATE_OPEN,
    BreakerState.HALF_OPEN: router_pb2.BREAKER_STATE_HALF_OPEN,
}


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """The router's own side."""

    def __init__(self, config: RouterConfig, pool: Pool, places: SlotPool, routes: Routes) -> None:
        """Tell of `pool`, and give out `places` as `routes`."""
        self._config = config
        self._pool = pool
        self._places = places
        self._routes = routes

    async def ListReplicas(  # noqa: N802 - gRPC's name
        self,
        request: router_pb2.ListReplicasRequest,
        context: grpc.aio.ServicerContext[router_pb2.ListReplicasRequest, router_pb2.ListReplicasResponse],
    ) -> router_pb2.ListReplicasResponse:
        """The replicas that are alive, and which may be given calls."""
        response = router_pb2.ListReplicasResponse(
            published_version=self._pool.published_version,
            min_policy_version=self._pool.min_version,
            num_waiting=self._places.num_waiting,
        )
        query, now = Query(min_version=self._pool.min_version), time.monotonic()
        for _, candidate in sorted(self._pool.candidates.items()):
            obstacle = find_reason(candidate, query, now)
            response.replicas.add(
                replica=candidate.replica,
                routable=obstacle is None,
                unroutable_reason="" if obstacle is None else obstacle.value,
                num_in_flight=candidate.num_in_flight,
                limit=candidate.limit.max_in_flight,
                load=candidate.own_load,
                breaker=_BREAKER_STATES[candidate.breaker.state],
            )
        return response

    async def Route(  # noqa: N802 - gRPC's name
        self,
        request: router_pb2.RouteRequest,
        context: grpc.aio.ServicerContext[router_pb2.RouteRequest, router_pb2.RouteResponse],
    ) -> router_pb2.RouteResponse:
        """Choose a replica or a pair, and keep the place there, or both places."""
        query = Query(
            session_id=request.session_id,
            min_version=request.min_policy_version,
            excluded=frozenset(request.excluded_replica_ids),
            blocks=hash_blocks(request.prefix_ids) if self._places.balancer.reads_blocks else (),
            num_tokens=request.num_prompt_ids + 1 if request.num_prompt_ids else 0,
        )
        if not request.ttl_s >= 0:
            raise InvalidRequestError(f"ttl_s = {request.ttl_s} is no length of time; give seconds, or 0")
        ttl_s = min(request.ttl_s or self._config.route_ttl_s, self._config.route_ttl_s)
        deadline = time.monotonic() + deadline_s(context, default=self._config.max_call_s)
        place = await self._places.take(Ticket(query=query, deadline=deadline))
        replica, max_tokens, prefill = place.member.candidate.replica, place.max_tokens, place.split()
        return router_pb2.RouteResponse(
            route_id=self._routes.open(place, ttl_s=ttl_s),
            replica_id=replica.replica_id,
            address=replica.address,
            ttl_s=ttl_s,
            prefill=None if prefill is None else self._open_prefill(prefill, ttl_s=ttl_s),
            bootstrap=place.bootstrap,
            max_tokens=max_tokens,
        )

    def _open_prefill(self, place: Slot, *, ttl_s: float) -> router_pb2.PrefillRoute:
        replica = place.member.candidate.replica
        return router_pb2.PrefillRoute(
            route_id=self._routes.open(place, ttl_s=ttl_s), replica_id=replica.replica_id, address=replica.address
        )

    async def ReleaseRoute(  # noqa: N802 - gRPC's name
        self,
        request: router_pb2.ReleaseRouteRequest,
        context: grpc.aio.ServicerContext[router_pb2.ReleaseRouteRequest, router_pb2.ReleaseRouteResponse],
    ) -> router_pb2.ReleaseRouteResponse:
        """Give the place back."""
        return await self._routes.release(request.route_id, request.outcome)

    async def DrainReplica(  # noqa: N802 - gRPC's name
        self,
        request: router_pb2.RouterServiceDrainReplicaRequest,
        context: grpc.aio.ServicerContext[
            router_pb2.RouterServiceDrainReplicaRequest, router_pb2.RouterServiceDrainReplicaResponse
        ],
    ) -> router_pb2.RouterServiceDrainReplicaResponse:
        """Have the replica drain; all routers learn of it by its lease."""
        if request.replica_id not in self._pool.candidates:
            known = ", ".join(sorted(self._pool.candidates)) or "none"
            raise InvalidRequestError(
                f"replica_id = {request.replica_id!r} is no replica that holds a lease; there are: {known}"
            )
        member = self._pool.member(request.replica_id)
        # Not on the pool's channel: that closes when the lease ends, as it does at the end of a replica's life.
        async with connect(member.candidate.replica.address, self._pool.security) as channel:
            pending = rollout_pb2_grpc.RolloutServiceStub(channel).DrainReplica(
                rollout_pb2.DrainReplicaRequest(grace_s=request.grace_s),
                timeout=deadline_s(context, default=self._config.max_call_s),
            )
            drained = await call(pending, peer=member.name)
        return router_pb2.RouterServiceDrainReplicaResponse(
            num_finished=drained.num_finished, num_handed_over=drained.num_handed_over
        )
