"""The service's metrics for Prometheus, in their own registry."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from services.reward.admission_queue import AdmissionQueue
from services.reward.isolation.pool import WorkerPool
from services.reward.verdict import Finding

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)


class Metrics:
    """Counters that the verifier updates, and gauges that are read on request."""

    def __init__(self, pool: WorkerPool, queue: AdmissionQueue) -> None:
        self._registry = CollectorRegistry()
        self._items = Counter(
            "penstock_reward_items",
            "Items verified, by profile, status and deciding method.",
            ("profile", "status", "method"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "penstock_reward_item_seconds",
            "Seconds that an item took, queueing excluded.",
            ("method",),
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._of_kind: dict[tuple[str, str, str], tuple[Counter, Histogram]] = {}
        for name, text, read in (
            ("queue_items", "Items in the service, running ones included.", lambda: queue.num_admitted),
            ("queue_max_items", "The most items that the service admits at once.", lambda: queue.max_items),
            ("workers", "Worker processes alive.", lambda: pool.num_workers),
            ("workers_busy", "Worker processes that are at an item.", lambda: pool.num_busy),
            ("workers_overtime", "Of those, worker processes whose item is in overtime.", lambda: pool.num_overtime),
            ("items_waiting", "Items that wait for a worker process.", lambda: pool.num_waiting),
            ("workers_killed", "Worker processes killed since the start.", lambda: pool.num_killed),
        ):
            Gauge(f"penstock_reward_{name}", text, registry=self._registry).set_function(read)

    def count(self, profile: str, finding: Finding, elapsed_s: float) -> None:
        """Count one item."""
        kind = (profile, finding.status, finding.method)
        counters = self._of_kind.get(kind)
        if counters is None:  # looking up children by their labels costs more than counting
            counters = self._of_kind[kind] = (self._items.labels(*kind), self._seconds.labels(finding.method))
        items, seconds = counters
        items.inc()
        seconds.observe(elapsed_s)

    def page(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
