"""What a trainer measures: the run's position, its groups, the newest step, pushes and the disk."""

import shutil
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

from prometheus_client.core import Metric

from penstock.telemetry import metrics
from penstock.v1 import trainer_pb2
from services.trainer.admission.ledger import GroupLedger
from services.trainer.flow.feeder import Feeder
from services.trainer.telemetry.progress import Progress

EVALUATION_SCORE = metrics.gauge(
    "penstock_trainer_evaluation_score", "Score of the newest evaluation, by set.", ("set",)
)
_STEP_SECONDS = metrics.histogram("penstock_trainer_step_seconds", "Seconds of a step.")
_PUSH_SECONDS = metrics.histogram("penstock_trainer_push_seconds", "Seconds of a push to all replicas.")
_PART_SECONDS = metrics.counter(
    "penstock_trainer_step_part_seconds_total",
    "Seconds of steps, by what the trainer did: train, or wait for groups (wait), prompts (data_wait), demonstrations, "
    "pushes, checkpoints or evaluations.",
    ("part",),
)
_FAILED_PUSHES = metrics.counter(
    "penstock_trainer_push_failed_replicas_total", "Replicas that a push did not reach, summed over pushes."
)
_SAMPLES = metrics.counter("penstock_trainer_samples_total", "Samples trained.")
_UNJUDGED = metrics.counter("penstock_trainer_samples_unjudged_total", "Of those, samples without a verdict.")
_TOKENS = metrics.counter(
    "penstock_trainer_tokens_total",
    "The policy's own tokens trained, by the versions that they lag, estimated; 8 stands for 8 and more.",
    ("lag",),
)
_STEP = metrics.reading("penstock_trainer_step", "Optimizer steps done.")
_NUM_STEPS = metrics.reading("penstock_trainer_num_steps", "Optimizer steps of the whole run.")
_VERSION = metrics.reading("penstock_trainer_policy_version", "Policy version that was announced last.")
_CHECKPOINT = metrics.reading("penstock_trainer_checkpoint_step", "Step of the newest checkpoint.")
_PHASE = metrics.reading(
    "penstock_trainer_phase", "1 for what the trainer is doing at the moment, 0 for all else.", ("phase",)
)
_SINCE_STEP = metrics.reading(
    "penstock_trainer_seconds_since_step",
    "Seconds since the last step, since an evaluation that held up steps, or since the trainer began to train.",
)
_USUAL_STEP = metrics.reading(
    "penstock_trainer_usual_step_seconds", "Median seconds of the last 50 steps; absent before the first one."
)
_UNTRAINED = metrics.reading("penstock_trainer_groups_untrained", "Groups admitted and not yet trained.")
_GATE = metrics.reading("penstock_trainer_gate_groups", "The most groups that the gate lets be untrained.")
_SINCE_ADMISSION = metrics.reading(
    "penstock_trainer_seconds_since_admission",
    "Seconds since the gate admitted a group, since an evaluation that held up steps, or since the trainer started.",
)
_ADMITTED = metrics.reading(
    "penstock_trainer_groups_admitted_total", "Groups admitted since the run began, each once.", kind="counter"
)
_GROUPS = metrics.reading(
    "penstock_trainer_groups_total",
    "Groups since the run began, by outcome: trained, stale, failed, filtered or lost.",
    ("outcome",),
    kind="counter",
)
_DISK_FREE = metrics.reading("penstock_trainer_disk_free_bytes", "Free space of the disk with the run folder.")
_DISK = metrics.reading("penstock_trainer_disk_bytes", "Size of the disk with the run folder.")

_OF_STEP: Final = {
    name: metrics.reading(f"penstock_step_{name}", f"Of the newest step: {text}")
    for name, text in {
        "reward_mean": "mean reward of judged samples in the batch.",
        "reward_mean_played": "mean reward of all groups that arrived, filtered ones included.",
        "reward_std": "standard deviation of rewards in the batch.",
        "zero_std_fraction": "share of groups whose rewards are all equal.",
        "filtered_group_fraction": "share of arrived groups that filters left out.",
        "sample_tokens_mean": "mean of the policy's own tokens of a sample.",
        "truncated_fraction": "share of samples cut by length: at sampling.max_new_tokens, the context or a limit.",
        "dlogp_mean": "mean absolute difference of log-probabilities between trainer and engine, in nats.",
        "dlogp_mean_current": "the same of tokens of the current version, which is numerical error alone.",
        "kl_k3": "estimate of KL(engine, trainer), in nats.",
        "staleness_mean": "versions by which a group's oldest token lags, mean over groups.",
        "staleness_max": "the same, of the oldest group.",
        "max_staleness": "the most versions that it may lag.",
        "loss": "the loss that was minimised.",
        "grad_norm": "norm of the gradient, before the clip.",
        "entropy": "entropy of the policy at its own tokens, in nats.",
        "clip_fraction": "share of tokens whose objective the trust region changed.",
        "rejected_fraction": "share of tokens with an advantage that have no policy gradient.",
        "learning_rate": "learning rate.",
        "trainer_idle_fraction": "share of the step that the trainer did not compute.",
        "output_tokens_per_s": "the policy's own tokens for each second of the step.",
        "trained_tokens_per_s": "trained tokens, prompts included, for each second of computing.",
        "prefill_ratio": "prompt tokens computed for each that had to be.",
        "num_steps_without_gradient": "steps in a row without policy gradient, this one included.",
        "num_replicas": "live replicas.",
        "push_pause_s": "seconds that an engine paused for the push, on average.",
        "push_pause_max_s": "seconds that the engine paused that paused longest for the push.",
        "host_memory_peak_bytes": "peak memory of the trainer's process.",
        "device_memory_peak_bytes": "peak memory on the trainer's GPU.",
    }.items()
}
"""Numbers of metrics.jsonl, under the same names."""
_PARTS: Final = ("train", "wait", "data_wait", "demonstration_wait", "push_wait", "checkpoint_wait", "evaluation_wait")
_LAG = "num_tokens_lag_"
_MAX_LAG: Final = 8
_STEPS_FOR_USUAL: Final = 50


class TrainerMetrics:
    """Counts steps, and reads the state of a run."""

    def __init__(self, *, progress: Progress, ledger: GroupLedger[Any, Any], feeder: Feeder, folder: Path) -> None:
        """Read these; `folder` is the run's."""
        self._progress = progress
        self._ledger = ledger
        self._feeder = feeder
        self._folder = folder
        self._stepped_at = time.monotonic()
        self._newest: dict[str, float] = {}
        self._step_s: deque[float] = deque(maxlen=_STEPS_FOR_USUAL)

    def observe(self, row: Mapping[str, Any]) -> None:
        """Count a step by its row of metrics.jsonl."""
        self._stepped_at = time.monotonic()
        self._newest = {name: float(row[name]) for name in _OF_STEP if _is_number(row.get(name))}
        self._step_s.append(row["step_s"])
        _STEP_SECONDS.observe(row["step_s"])
        _PUSH_SECONDS.observe(row["push_s"])
        _FAILED_PUSHES.inc(row["push_failed_replicas"])
        _SAMPLES.inc(row["num_samples"])
        _UNJUDGED.inc(row["num_unjudged_samples"])
        for part in _PARTS:
            _PART_SECONDS.labels(part).inc(row[f"{part}_s"])
        for name, count in row.items():
            if name.startswith(_LAG):
                _TOKENS.labels(str(min(_MAX_LAG, int(name.removeprefix(_LAG))))).inc(count)

    async def read(self) -> Iterable[Metric]:
        """Return where the run stands."""
        progress, ledger, now = self._progress, self._ledger, time.monotonic()
        counts = ledger.counts
        outcomes = {
            "trained": counts.trained,
            "stale": counts.rejected,
            "failed": counts.failed,
            "filtered": counts.filtered,
            "lost": counts.lost,
        }
        phases = {
            (name.removeprefix("RUN_PHASE_").lower(),): float(number == progress.phase)
            for name, number in trainer_pb2.RunPhase.items()
            if number != trainer_pb2.RUN_PHASE_UNSPECIFIED
        }
        disk = shutil.disk_usage(self._folder)
        return [
            _STEP.of(progress.step),
            _NUM_STEPS.of(progress.num_steps),
            _VERSION.of(progress.policy_version),
            _CHECKPOINT.of(progress.checkpoint_step),
            _PHASE.by(phases),
            _SINCE_STEP.of(now - max(self._stepped_at, progress.evaluated_at)),
            *([_USUAL_STEP.of(median(self._step_s))] if self._step_s else []),
            _UNTRAINED.of(ledger.num_untrained),
            _GATE.of(ledger.gate.capacity),
            _SINCE_ADMISSION.of(now - max(self._feeder.admitted_at, progress.evaluated_at)),
            _ADMITTED.of(ledger.next_index),
            _GROUPS.by({(outcome,): count for outcome, count in outcomes.items()}),
            _DISK_FREE.of(disk.free),
            _DISK.of(disk.total),
            *(_OF_STEP[name].of(value) for name, value in self._newest.items()),
        ]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
