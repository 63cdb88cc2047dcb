"""SlotPool that clients keep for themselves, to talk to a replica without the router between.

Invariant: each ends exactly once, by being given back or by its time.
"""

import asyncio
import uuid

import structlog

from penstock.clients.stream_attempt import UnreachableError
from penstock.errors import NotReadyError, PenstockError, UnavailableError
from penstock.v1 import router_pb2
from services.router.slot import Slot

log = structlog.get_logger()

_ERROR_OF_OUTCOME: dict[int, type[PenstockError]] = {
    router_pb2.ROUTE_OUTCOME_FAILED: UnavailableError,
    router_pb2.ROUTE_OUTCOME_UNREACHABLE: UnreachableError,
    router_pb2.ROUTE_OUTCOME_REFUSED: NotReadyError,
}


class Routes:
    """The places given out."""

    def __init__(self) -> None:
        """None yet."""
        self._places: dict[str, tuple[Slot, asyncio.TimerHandle]] = {}

    def open(self, place: Slot, *, ttl_s: float) -> str:
        """Keep the place for `ttl_s`; returns its name."""
        route_id = uuid.uuid4().hex
        ending = asyncio.get_running_loop().call_later(ttl_s, self._expire, route_id)
        self._places[route_id] = place, ending
        return route_id

    async def release(
        self, route_id: str, outcome: router_pb2.RouteOutcome.ValueType
    ) -> router_pb2.ReleaseRouteResponse:
        """Give the place back.

        Args:
            route_id: Its name.
            outcome: What came of the call.
        """
        place = self._end(route_id)
        if place is None:
            return router_pb2.ReleaseRouteResponse(was_kept=False)
        was_pushed = False
        with place:
            if outcome == router_pb2.ROUTE_OUTCOME_SUCCEEDED:
                place.settle(None)
            elif outcome in _ERROR_OF_OUTCOME:
                error = _ERROR_OF_OUTCOME[outcome]()
                judged = await place.judge(error)
                was_pushed = judged is not error
                if place.culprit is place:
                    place.settle(judged)
        return router_pb2.ReleaseRouteResponse(was_kept=True, was_pushed=was_pushed)

    def close(self) -> None:
        """Give all back."""
        for route_id in list(self._places):
            self._give_back(route_id)

    def _expire(self, route_id: str) -> None:
        place, _ = self._places[route_id]
        log.warning("route.expired", route=route_id, replica=place.member.candidate.replica_id)
        self._give_back(route_id)

    def _give_back(self, route_id: str) -> None:
        place = self._end(route_id)
        if place is not None:
            place.give_back()

    def _end(self, route_id: str) -> Slot | None:
        """The place, which is no route's any more."""
        kept = self._places.pop(route_id, None)
        if kept is None:
            return None
        place, ending = kept
        ending.cancel()
        return place
