"""Slots that clients hold themselves, to call a replica without the router in between.

Invariant: each ends exactly once, by its release or by its time.
"""

import asyncio
import uuid

import structlog

from penstock.clients.stream_attempt import LostReplicaError
from penstock.errors import NotReadyError, PenstockError, UnavailableError
from penstock.v1 import router_pb2
from services.router.slots.slot import Slot

log = structlog.get_logger()

_ERROR_OF_OUTCOME: dict[int, type[PenstockError]] = {
    router_pb2.ROUTE_OUTCOME_FAILED: UnavailableError,
    router_pb2.ROUTE_OUTCOME_UNREACHABLE: LostReplicaError,
    router_pb2.ROUTE_OUTCOME_REJECTED: NotReadyError,
}


class Routes:
    """The slots that clients hold."""

    def __init__(self) -> None:
        """Start without slots."""
        self._slots: dict[str, tuple[Slot, asyncio.TimerHandle]] = {}

    def open(self, slot: Slot, *, ttl_s: float) -> str:
        """Keep the slot for `ttl_s`; return the route's id."""
        route_id = uuid.uuid4().hex
        expiry = asyncio.get_running_loop().call_later(ttl_s, self._expire, route_id)
        self._slots[route_id] = slot, expiry
        return route_id

    async def release(
        self, route_id: str, outcome: router_pb2.RouteOutcome.ValueType
    ) -> router_pb2.ReleaseRouteResponse:
        """Release the slot.

        Args:
            route_id: The route's id.
            outcome: The result of the call.
        """
        slot = self._end(route_id)
        if slot is None:
            return router_pb2.ReleaseRouteResponse()
        was_pushed = False
        try:
            if outcome == router_pb2.ROUTE_OUTCOME_SUCCEEDED:
                slot.succeed()
            elif outcome in _ERROR_OF_OUTCOME:
                error = _ERROR_OF_OUTCOME[outcome]()
                was_pushed = await slot.fail(error, is_prefill=False) is not error
        finally:
            slot.release()
        return router_pb2.ReleaseRouteResponse(was_pushed=was_pushed)

    def close(self) -> None:
        """Release all slots."""
        for route_id in list(self._slots):
            self._release(route_id)

    def _expire(self, route_id: str) -> None:
        slot, _ = self._slots[route_id]
        log.warning("route.expired", route=route_id, replica_id=slot.replica_id)
        self._release(route_id)

    def _release(self, route_id: str) -> None:
        slot = self._end(route_id)
        if slot is not None:
            slot.release()

    def _end(self, route_id: str) -> Slot | None:
        kept = self._slots.pop(route_id, None)
        if kept is None:
            return None
        slot, expiry = kept
        expiry.cancel()
        return slot
