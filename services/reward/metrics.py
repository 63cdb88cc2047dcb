"""What the reward service measures."""

from collections.abc import Iterable

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric

from penstock.telemetry import metrics
from services.reward.admission_queue import AdmissionQueue
from services.reward.isolation.pool import WorkerPool
from services.reward.verdict import Finding

_ITEMS = metrics.counter(
    "penstock_reward_items_total",
    "Items verified, by profile, status and deciding method.",
    ("profile", "status", "method"),
)
_ITEM_SECONDS = metrics.histogram(
    "penstock_reward_item_seconds",
    "Seconds that an item took, queueing excluded.",
    ("method",),
    buckets=(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 60.0),
)
_QUEUE = metrics.reading("penstock_reward_queue_items", "Items in the service, running ones included.")
_QUEUE_MAX = metrics.reading("penstock_reward_queue_max_items", "The most items that the service admits at once.")
_WORKERS = metrics.reading("penstock_reward_workers", "Worker processes alive.")
_BUSY = metrics.reading("penstock_reward_workers_busy", "Worker processes that are at an item.")
_OVERTIME = metrics.reading("penstock_reward_workers_overtime", "Of those, worker processes whose item is in overtime.")
_WAITING = metrics.reading("penstock_reward_items_waiting", "Items that wait for a worker process.")
_KILLED = metrics.reading("penstock_reward_workers_killed", "Worker processes killed since the start.")


class Metrics:
    """Counts items, and reads the state of one service."""

    def __init__(self, pool: WorkerPool, queue: AdmissionQueue) -> None:
        self._pool = pool
        self._queue = queue
        self._of_kind: dict[tuple[str, str, str], tuple[Counter, Histogram]] = {}

    def count(self, profile: str, finding: Finding, elapsed_s: float) -> None:
        """Count one item."""
        kind = (profile, finding.status, finding.method)
        counters = self._of_kind.get(kind)
        if counters is None:  # looking up children by their labels costs more than counting
            counters = self._of_kind[kind] = (_ITEMS.labels(*kind), _ITEM_SECONDS.labels(finding.method))
        items, seconds = counters
        items.inc()
        seconds.observe(elapsed_s)

    async def read(self) -> Iterable[Metric]:
        """Return how full the service is."""
        pool, queue = self._pool, self._queue
        return [
            _QUEUE.of(queue.num_admitted),
            _QUEUE_MAX.of(queue.max_items),
            _WORKERS.of(pool.num_workers),
            _BUSY.of(pool.num_busy),
            _OVERTIME.of(pool.num_overtime),
            _WAITING.of(pool.num_waiting),
            _KILLED.of(pool.num_killed),
        ]
