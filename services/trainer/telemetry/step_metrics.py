"""Metrics of a step other than the backend's: its batch, its push, its times, and the groups of the run."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.records import Group
from services.trainer.admission.filters import FilterReason, SampleFilter
from services.trainer.admission.group_state import GroupCounts
from services.trainer.admission.pools import Pool
from services.trainer.batching.sequences import TrainGroup
from services.trainer.flow.filter_tally import Interval
from services.trainer.telemetry.episode_metrics import num_observation_tokens
from services.trainer.weight_sync.push_report import PushReport

_PARTS = (
    "wait_s",
    "data_wait_s",
    "demonstration_wait_s",
    "push_wait_s",
    "checkpoint_wait_s",
    "evaluation_wait_s",
    "train_s",
)
"""Of a step, as docs/metrics.md explains them; each may come several times."""


class StepClock:
    """Measures the parts of a step, which follow each other."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start the first part."""
        self.spans: list[tuple[str, float, float]] = []
        """The parts in order: name, start by `now`, and seconds."""
        self._now = now
        self._started = self._lap_started = now()
        self._laps = dict.fromkeys(_PARTS, 0.0)
        self._stopped: float | None = None
        self._has_stopped = asyncio.Event()

    def lap(self, name: str) -> None:
        """End a part of the step and start the next one; parts of the same name add up."""
        now = self._now()
        self._laps[name] += now - self._lap_started
        self.spans.append((name, self._lap_started, now - self._lap_started))
        self._lap_started = now

    def stop(self) -> None:
        """End the step."""
        self._stopped = self._now()
        self._has_stopped.set()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part and, as `step_s`, of the whole step: until it was stopped, or so far."""
        ended = self._now() if self._stopped is None else self._stopped
        return self._laps | {"step_s": ended - self._started}

    async def final_seconds(self) -> dict[str, float]:
        """Wait until the step is stopped, and return its `seconds`."""
        await self._has_stopped.wait()
        return self.seconds()


def describe_batch(groups: Sequence[Group]) -> dict[str, Any]:
    """Describe the batch as it was played."""
    samples = [sample for group in groups for sample in group.samples]
    return {
        "groups": [group.id.index for group in groups],
        "num_unjudged_samples": sum(sample.reward is None for sample in samples),
        "num_truncated_samples": sum(sample.finish_reason == "length" for sample in samples),
        "truncated_fraction": sum(sample.finish_reason == "length" for sample in samples) / max(1, len(samples)),
        "num_deadline_samples": sum(sample.finish_reason == "deadline" for sample in samples),
        "num_cached_tokens": sum(sample.num_cached_tokens for sample in samples),
        "prefill_ratio": prefill_ratio(groups),
    }


def describe_filters(played: Sequence[Group], ready: Sequence[TrainGroup], since: Interval) -> dict[str, Any]:
    """Describe what the filters did to the batch, and to the groups that arrived since the last step.

    `reward_mean_played` covers all samples of those groups, before any filter: the reward of the policy. `reward_mean`
    covers the batch, which a filter of groups keeps away from 0 and 1.

    Args:
        played: The batch as it was played.
        ready: The batch as it was trained.
        since: The groups that reached the filters since the last step.
    """
    metrics = {
        "num_masked_samples": sum(sum(group.masked) for group in ready),
        "num_dropped_samples": sum(
            len(group.samples) - len(trained.samples) for group, trained in zip(played, ready, strict=True)
        ),
        "filtered_group_fraction": since.num_filtered / since.num_groups if since.num_groups else 0.0,
    }
    if since.rewards:
        metrics["reward_mean_played"] = sum(since.rewards) / len(since.rewards)
    return metrics


def prefill_ratio(groups: Sequence[Group]) -> float:
    """Return the prompt tokens that the engines computed, divided by those that they had to.

    A group needs its prompt once, and for each later turn the tokens that the environment added; the rest can come from
    the prefix cache. Below 1 if groups begin with the same tokens; 0 if nothing was needed.
    """
    num_computed = num_needed = 0
    for group in groups:
        num_needed += max((sample.turns[0].num_prompt_tokens for sample in group.samples if sample.turns), default=0)
        for sample in group.samples:
            num_computed += sum(turn.num_prompt_tokens - turn.num_cached_tokens for turn in sample.turns)
            num_needed += num_observation_tokens(sample)
    return num_computed / num_needed if num_needed else 0.0


def describe_push(report: PushReport, *, num_live_replicas: int) -> dict[str, Any]:
    """Describe the push of the step's weights."""
    slowest, pause_max_s = report.longest_pause
    return {
        "push_s": report.push_s,
        "push_pause_s": report.pause_s,
        "push_pause_max_s": pause_max_s,
        "push_pause_max_replica": slowest,
        "push_bytes": report.num_bytes,
        "push_failed_replicas": report.num_failed,
        "push_replicas": report.num_replicas,
        "num_replicas": num_live_replicas,
    }


def describe_groups(counts: GroupCounts, *, num_duplicate: int, num_unreadable: int) -> dict[str, int]:
    """Describe the outcomes of groups since the run began, and what filters did to samples.

    The last two counts are since the trainer started.
    """
    return {
        "num_trained_groups": counts.trained,
        "num_stale_groups": counts.rejected,
        "num_stale_tokens": counts.rejected_tokens,
        "num_failed_groups": counts.failed,
        "num_filtered_groups": counts.filtered,
        "num_filtered_tokens": counts.filtered_tokens,
        **{f"num_filtered_groups_{reason}": counts.filtered_by_reason.get(reason, 0) for reason in FilterReason},
        **{f"num_samples_{each}": counts.affected.get(each, 0) for each in SampleFilter},
        "num_lost_groups": counts.lost,
        "num_redrawn_groups": counts.redrawn,
        "num_redrawn_tokens": counts.redrawn_tokens,
        "num_duplicate_groups": num_duplicate,
        "num_unreadable_groups": num_unreadable,
    }


def describe_pools(shares: Mapping[Pool, float]) -> dict[str, float]:
    """Describe the row pools by their shares of all rows."""
    return {f"{pool}_pool_share": share for pool, share in shares.items()}
