"""A step's logged values beside those of its replay."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.trainer.admission.filters import FilterReason
from services.trainer.replay.recording import StepInputs
from services.trainer.replay.replay import ReplayedStep
from services.trainer.telemetry.metrics_log import EXACT, as_logged

Value = float | str | None
"""A metric or a digest; None if there is none."""

_SHOWN = (
    "loss",
    "grad_norm",
    "learning_rate",
    "skipped",
    "num_groups",
    *(f"num_groups_{reason}" for reason in FilterReason),
    "num_masked_samples",
    "num_dropped_samples",
    "num_tokens",
    "reward_mean",
    "dlogp_mean",
    "dlogp_max",
    "kl_k3",
    "tis_mean",
    "tis_capped_fraction",
    "tis_ess",
    "clip_fraction",
    "rejected_fraction",
    "ratio_max",
    "policy_loss",
    "kl_loss",
    "drift_loss",
    "entropy_loss",
    "ce_loss",
    "kl_reference",
    "entropy",
    "demonstration_cross_entropy",
    "num_demonstration_tokens",
)
_OF_THE_MACHINE = frozenset(
    {
        "step_time_s",
        "trained_tokens_per_s",
        "tflops_per_rank",
        "mfu",
        "rank_imbalance",
        "host_memory_peak_bytes",
        "device_memory_peak_bytes",
    }
)
"""Metrics that differ from one computation of a step to the next, or with the number of ranks alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One value of a step."""

    name: str
    recorded: Value
    replayed: Value
    changed: Value
    """The value under other settings; None if none were given."""

    @property
    def agrees(self) -> bool | None:
        """Whether the replay equals the recorded value; None if none was recorded."""
        if self.recorded is None or self.replayed is None:
            return None
        return _are_equal(self.name, self.recorded, self.replayed)


def compare(
    inputs: StepInputs, logged: Mapping[str, Any], replayed: ReplayedStep, changed: ReplayedStep | None = None
) -> list[Line]:
    """Return the values of a step, beginning with the digests before it and ending with the one after it.

    Args:
        inputs: The recording.
        logged: The step's line of metrics.jsonl; empty if there is none. Metrics that it lacks were not known to the
            version that wrote it, and are left out.
        replayed: The step under the recorded settings.
        changed: The step under other settings.
    """
    names = [name for name in replayed.metrics if name not in _OF_THE_MACHINE and (name in logged or not logged)]
    shown = [name for name in _SHOWN if name in {*names, *(changed.metrics if changed else ())}]
    differing = [
        name for name in names if name not in shown and not _are_equal(name, logged.get(name), _logged(replayed, name))
    ]
    return [
        Line(
            name="weights before",
            recorded=inputs.weights,
            replayed=replayed.weights_before,
            changed=changed.weights_before if changed else None,
        ),
        Line(
            name="random state",
            recorded=inputs.random_state,
            replayed=replayed.random_state,
            changed=changed.random_state if changed else None,
        ),
        *(
            Line(
                name=name,
                recorded=logged.get(name),
                replayed=_logged(replayed, name),
                changed=_logged(changed, name) if changed else None,
            )
            for name in [*shown, *(differing if logged else [])]
        ),
        Line(
            name="weights after",
            recorded=logged.get("weights_digest"),
            replayed=replayed.weights_after,
            changed=changed.weights_after if changed else None,
        ),
    ]


def verdict(lines: Sequence[Line]) -> bool | None:
    """Return whether the replay equals everything recorded; None if no result of the step was recorded."""
    results = [line.agrees for line in lines if line.agrees is not None]
    has_results = any(line.agrees is not None for line in lines[2:])
    return all(results) if has_results or not all(results) else None


def _are_equal(name: str, recorded: Value, replayed: Value) -> bool:
    """Return whether a replay gave the recorded value. Earlier releases gave whole numbers six digits, too."""
    if not (isinstance(recorded, float) and isinstance(replayed, float)):
        return recorded == replayed
    if math.isnan(recorded) or math.isnan(replayed):
        return math.isnan(recorded) and math.isnan(replayed)
    return recorded == replayed or (name not in EXACT and recorded == float(f"{replayed:.6g}"))


def _logged(step: ReplayedStep, name: str) -> Value:
    value: Value = as_logged(name, step.metrics.get(name))
    return value
