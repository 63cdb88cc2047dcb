"""What an engine measures beside SGLang's own metrics: its state and its load."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from penstock.telemetry import metrics
from penstock.v1 import common_pb2
from services.rollout.engine.replica_view import ReplicaView

_STATE = metrics.reading(
    "penstock_engine_state", "1 for the state that the engine is in, 0 for the others.", ("state",)
)
_VERSION = metrics.reading("penstock_engine_policy_version", "Policy version of the engine's weights.")
_RUNNING = metrics.reading("penstock_engine_requests_running", "Requests that generate.")
_QUEUED = metrics.reading("penstock_engine_requests_queued", "Requests in the engine that wait.")
_MAX_RUNNING = metrics.reading("penstock_engine_max_running", "Requests that generate at once, at most.")
_KV_USE = metrics.reading("penstock_engine_kv_use_ratio", "Share of the KV cache in use, from 0 to 1.")

_STATE_PREFIX = "REPLICA_STATE_"


class EngineMetrics:
    """Reads the state of one engine."""

    def __init__(self, view: ReplicaView) -> None:
        self._view = view

    async def read(self) -> Iterable[Metric]:
        """Return the engine's state and load."""
        replica = self._view.describe()
        states = {
            (name.removeprefix(_STATE_PREFIX).lower(),): float(number == replica.state)
            for name, number in common_pb2.ReplicaState.items()
            if number != common_pb2.REPLICA_STATE_UNSPECIFIED
        }
        return [
            _STATE.by(states),
            _VERSION.of(replica.policy_version),
            _RUNNING.of(replica.num_running),
            _QUEUED.of(replica.num_queued),
            _MAX_RUNNING.of(replica.max_running),
            _KV_USE.of(replica.kv_use),
        ]
