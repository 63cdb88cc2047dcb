"""What a worker measures: groups, samples, turns, verdicts."""

from collections.abc import Sequence

from penstock.records import Sample
from penstock.telemetry import metrics

SLOTS = metrics.gauge("penstock_worker_slots", "Groups that this worker plays at once, at most.")
GROUPS = metrics.counter(
    "penstock_worker_groups_total",
    "Groups that this worker published, by outcome: played, lost (an image is gone) or given_up.",
    ("outcome",),
)
_GROUP_SECONDS = metrics.histogram(
    "penstock_worker_group_seconds", "Seconds from a group's first turn to its last verdict."
)
_SAMPLES = metrics.counter("penstock_worker_samples_total", "Samples played, by how they ended.", ("end",))
_TOKENS = metrics.counter("penstock_worker_tokens_total", "The policy's own tokens in samples played.")
_VERDICTS = metrics.counter("penstock_worker_verdicts_total", "Verdicts on samples, by status.", ("status",))
_TURN_SECONDS = metrics.histogram(
    "penstock_worker_turn_seconds", "Seconds of a turn from its first tokens to its last, without waiting."
)
_TURN_WAIT_SECONDS = metrics.histogram(
    "penstock_worker_turn_wait_seconds", "Seconds of a turn before its first tokens: queues, retries and prefill."
)
VERDICT_SECONDS = metrics.histogram(
    "penstock_worker_verdict_seconds", "Seconds that the reward service took for a group's verdicts, retries included."
)


def count_group(samples: Sequence[Sample], elapsed_s: float) -> None:
    """Count the samples of a played group."""
    _GROUP_SECONDS.observe(elapsed_s)
    for sample in samples:
        _SAMPLES.labels(sample.finish_reason).inc()
        _TOKENS.inc(sample.num_own_tokens)
        if sample.verdict is not None:
            _VERDICTS.labels(sample.verdict.status).inc()


def count_turn(*, waited_s: float, generated_s: float) -> None:
    """Count a turn that has tokens."""
    _TURN_WAIT_SECONDS.observe(waited_s)
    _TURN_SECONDS.observe(generated_s)
