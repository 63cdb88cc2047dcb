"""What a router measures: its replicas, its wait queues, and calls that moved."""

import time
from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import Metric

from penstock.telemetry import metrics
from penstock.v1 import common_pb2
from services.router.balancing import TRANSIENT, Query
from services.router.pool import Pool
from services.router.slots.breaker import BreakerState
from services.router.slots.slot_pool import SlotPool

_REPLICAS = metrics.reading(
    "penstock_router_replicas",
    "Replicas that hold a lease, by role and by what keeps them from taking a call (routable: nothing).",
    ("role", "condition"),
)
_ROUTABLE = metrics.reading(
    "penstock_router_routable_replicas", "Replicas that take calls, those that are full or take a push included."
)
_BREAKERS = metrics.reading(
    "penstock_router_open_breakers", "Replicas that get no calls, or a probe at a time, because their calls failed."
)
_SLOTS = metrics.reading("penstock_router_slots", "Calls that routable replicas may have at once, from this router.")
_IN_FLIGHT = metrics.reading("penstock_router_calls_in_flight", "Calls with a slot on a replica, from this router.")
_WAITING = metrics.reading("penstock_router_calls_waiting", "Calls that wait for a slot.")
_WAITING_BYTES = metrics.reading("penstock_router_waiting_bytes", "Size of the requests of waiting calls.")
_PUBLISHED = metrics.reading("penstock_router_published_version", "Policy version that the trainer announced last.")
_MIN_VERSION = metrics.reading("penstock_router_min_version", "Oldest policy version that may answer.")

_ROLE_PREFIX = "REPLICA_ROLE_"


class RouterMetrics:
    """Reads the state of one router."""

    def __init__(self, pool: Pool, slots: SlotPool) -> None:
        self._pool = pool
        self._slots = slots

    async def read(self) -> Iterable[Metric]:
        """Return the state of replicas and queues."""
        replicas, now = list(self._slots.replicas.values()), time.monotonic()
        query = Query(min_version=self._pool.min_version)
        conditions: Counter[tuple[str, ...]] = Counter()
        num_routable = num_slots = 0
        for replica in replicas:
            reason = self._slots.view.find_reason(replica.status, query, now)
            if reason is None or reason in TRANSIENT:
                num_routable += 1
                num_slots += replica.status.max_in_flight
            role = common_pb2.ReplicaRole.Name(replica.lease.role).removeprefix(_ROLE_PREFIX).lower()
            conditions[role, "routable" if reason is None else reason.name.lower()] += 1
        return [
            _REPLICAS.by(conditions),
            _ROUTABLE.of(num_routable),
            _BREAKERS.of(sum(each.breaker_state is not BreakerState.CLOSED for each in replicas)),
            _SLOTS.of(num_slots),
            _IN_FLIGHT.of(sum(each.num_in_flight for each in replicas)),
            _WAITING.of(self._slots.num_waiting),
            _WAITING_BYTES.of(self._slots.num_waiting_bytes),
            _PUBLISHED.of(self._pool.published_version),
            _MIN_VERSION.of(self._pool.min_version),
        ]
