"""Warns about steps in a row without policy gradient: the run goes on but learns nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from services.trainer.algorithm.metrics.clamped import CLAMPED_REMEDY, MIN_CLAMPED_FRACTION, clamped_cause

log = structlog.get_logger()

MAX_STEPS_IN_SILENCE: Final = 10
"""Steps in a row without policy gradient before the warning. Single ones are normal with small batches."""


@dataclass(slots=True)
class GradientStreak:
    """Counts steps without policy gradient, and warns once per streak."""

    _num_steps: int = 0

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the length of the streak as a metric, including this step.

        Args:
            metrics: The backend's metrics of the optimizer step.
        """
        reason = _reason(metrics)
        self._num_steps = self._num_steps + 1 if reason else 0
        if self._num_steps == MAX_STEPS_IN_SILENCE:
            log.warning(
                "gradient.missing",
                num_steps=self._num_steps,
                reward_mean=metrics["reward_mean"],
                zero_std_fraction=metrics["zero_std_fraction"],
                reason=reason,
            )
        return {"num_steps_without_gradient": float(self._num_steps)}


def _reason(metrics: Mapping[str, float]) -> str:
    """Return why a step had no policy gradient, and the remedy; empty if it had one."""
    if metrics.get("rejected_fraction") == 1 and metrics.get("clamped_fraction", 0.0) >= MIN_CLAMPED_FRACTION:
        return f"{clamped_cause(metrics['clamped_fraction'])}. {CLAMPED_REMEDY}"
    if metrics.get("rejected_fraction") == 1:
        return (
            "every token with an advantage was rejected, so only regularisers act; loosen trust_region, correction or "
            "rejection in [algorithm], or lower trainer.max_staleness"
        )
    if metrics["num_groups_without_gradient"] < metrics["num_groups"] and metrics["grad_norm"] > 0:
        return ""
    if metrics["zero_std_fraction"] == 1:
        return (
            "all samples of each group have the same reward. Near its maximum the data are too easy; otherwise they "
            "are too hard, or data.profile does not recognise the answers: read some, `penstock view RUN`. "
            "Groups with one judged sample are among them: see num_unjudged_samples in metrics.jsonl. "
            "filters.zero_variance = true passes over such groups, and a larger trainer.samples_per_group makes them "
            "rarer"
        )
    return (
        "no sample that could teach has an advantage: see num_unjudged_samples (the reward service), "
        "num_masked_samples (filters.truncated and filters.repetition) and num_groups_skipped in metrics.jsonl"
    )
