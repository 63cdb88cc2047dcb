"""Metrics of a step's episodes: turns, environments' observations and metrics, and how episodes ended."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from penstock.records import Group, Sample
from services.trainer.admission.pools import pass_rate


def describe_episodes(groups: Sequence[Group]) -> dict[str, Any]:
    """Describe the samples of a batch as episodes.

    An environment's metrics are under `environment/<name>/<metric>`: the mean of `Sample.metrics` over the samples that
    have the metric.
    """
    samples = [sample for group in groups for sample in group.samples]
    num_turns = [len(sample.turns) for sample in samples]
    return {
        "turns_mean": fmean(num_turns) if num_turns else 0.0,
        "turns_max": max(num_turns, default=0),
        "first_turn_accuracy": fmean(map(_is_right_at_once, samples)) if samples else 0.0,
        "observation_tokens_mean": fmean(map(num_observation_tokens, samples)) if samples else 0.0,
        "num_environment_samples": sum(sample.finish_reason == "environment" for sample in samples),
        "num_error_samples": sum(sample.finish_reason == "error" for sample in samples),
        **{
            f"environment/{environment}/{name}": value
            for environment, played in _by_environment(groups).items()
            for name, value in mean_metrics([sample.metrics for sample in played]).items()
        },
    }


def num_observation_tokens(sample: Sample) -> int:
    """Return the tokens, images expanded, between the turns of a sample that are not the policy's own.

    A turn of an agent that begins again where an earlier one did adds none.
    """
    return sum(
        max(0, later.num_prompt_tokens - turn.num_prompt_tokens - turn.num_output_tokens)
        for turn, later in pairwise(sample.turns)
    )


def _is_right_at_once(sample: Sample) -> bool:
    return len(sample.turns) == 1 and pass_rate([sample.reward]) == 1.0


def mean_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric, by name, over the samples that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for each in metrics:
        for name, value in each.items():
            values[name].append(value)
    return {name: fmean(values[name]) for name in sorted(values)}


def _by_environment(groups: Sequence[Group]) -> dict[str, list[Sample]]:
    played: dict[str, list[Sample]] = defaultdict(list)
    for group in groups:
        if group.environment:  # empty in groups recorded before the field existed
            played[group.environment].extend(group.samples)
    return played
