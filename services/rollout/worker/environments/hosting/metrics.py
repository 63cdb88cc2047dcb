"""What a server of environments measures. Calls that an environment fails are answered with 200, as are all others."""

from prometheus_client.core import Metric

from penstock.telemetry import metrics

_CALL_SECONDS = metrics.histogram(
    "penstock_environment_call_seconds", "Seconds of a call of an environment at this server, verdicts included."
)
_CALLS = metrics.counter(
    "penstock_environment_calls_total",
    "Calls of environments at this server, by outcome: answered, failed, or cut (nobody waits for the answer).",
    ("outcome",),
)
_EPISODES = metrics.reading("penstock_environment_episodes", "Episodes that live at this server.")
_MAX_EPISODES = metrics.reading(
    "penstock_environment_max_episodes", "The most episodes that may live at this server at once."
)


def count_call(seconds: float, outcome: str) -> None:
    """Count a call that ended."""
    _CALL_SECONDS.observe(seconds)
    _CALLS.labels(outcome).inc()


def room(num_episodes: int, max_episodes: int) -> list[Metric]:
    """Return how full the server is."""
    return [_EPISODES.of(num_episodes), _MAX_EPISODES.of(max_episodes)]
