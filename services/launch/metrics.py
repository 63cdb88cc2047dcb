"""Reads the trainer's metrics while the trainer writes them."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.telemetry.json_lines import JsonLinesFollower, every_field
from services.view.summary import reward_of

StepRow = dict[str, Any]
"""One optimizer step; keys are the trainer's metric names."""

_GROUP_COUNTS = ("trained", "stale", "failed", "filtered", "duplicate")
"""Outcomes of groups: the trainer counts each kind as num_<kind>_groups."""

_WAITS = (
    ("wait_s", "groups"),
    ("data_wait_s", "prompts"),
    ("demonstration_wait_s", "demonstrations"),
    ("push_wait_s", "pushes"),
    ("checkpoint_wait_s", "files"),
    ("evaluation_wait_s", "evaluation"),
)
"""Names of the trainer's waits in a step, by metric."""
_SHORTEST_WAIT_S = 0.05
"""Seconds; shorter waits would be shown as 0.0 s."""

_BARS = "▁▂▃▄▅▆▇█"

SHOWN: Final = frozenset(
    {
        *("step", "num_steps", "time", "elapsed_s", "step_s", "train_s", "policy_version", "skipped", "trainer_deaths"),
        *("reward_mean", "reward_mean_played", "loss", "dlogp_mean", "dlogp_max", "dlogp_mean_current"),
        *("staleness_mean", "staleness_max", "max_staleness", "trainer_idle_fraction", *(wait for wait, _ in _WAITS)),
        *("output_tokens_per_s", "trained_tokens_per_s", "num_replicas"),
        *("push_s", "push_replicas", "push_failed_replicas"),
        *(f"num_{kind}_groups" for kind in _GROUP_COUNTS),
        *("num_samples", "num_unjudged_samples", "truncated_fraction"),
        *("filtered_group_fraction", "zero_std_fraction", "num_steps_without_gradient", "num_episodes_dropped"),
    }
)
"""Metrics from which it is said where a run stands, and what is wrong with it."""
SUMMED_UP: Final = SHOWN | {"groups"}
"""Metrics that the description of a run at its end needs, too."""


class MetricsFollower:
    """The rows of a metrics file; each read continues where the last one ended."""

    def __init__(self, path: Path, *, keep: Callable[[str], bool] = every_field) -> None:
        """Follow the file at `path`, which need not exist yet; `keep` tells which metrics rows keep beside `step`."""
        self._file = JsonLinesFollower(path, keep=lambda name: name == "step" or keep(name))

    @property
    def rows(self) -> list[StepRow]:
        """All rows so far."""
        return self._file.rows

    def poll(self) -> list[StepRow]:
        """Read and return the new rows; steps seen before a resumed trainer replaced the file are not new."""
        last_step = self.rows[-1].get("step", 0) if self.rows else 0
        generation = self._file.generation
        rows = self._file.poll()
        was_read_again = self._file.generation > generation
        return [row for row in rows if row.get("step", 0) > last_step] if was_read_again else rows


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Draw `values` as at most `width` bars, each the mean of its share; lowest and highest bar span the range."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def describe_step(row: StepRow) -> str:
    """Describe one step in one line."""
    parts = [f"step {row.get('step', '?')}/{row.get('num_steps', '?')}"]
    if "reward_mean" in row:
        parts.append(f"reward {reward_of(row):.3f}")
    elif "loss" in row:
        parts.append(f"loss {row['loss']:.4f}  {row.get('trained_tokens_per_s', 0):,.0f} tokens/s")
    if "staleness_mean" in row:
        parts.append(f"staleness {row['staleness_mean']:.2f} (max {row.get('staleness_max', 0):g})")
    if row.get("filtered_group_fraction"):
        parts.append(f"filtered {row['filtered_group_fraction']:.0%}")
    parts += [f"{row['output_tokens_per_s']:,.0f} tokens/s"] if "output_tokens_per_s" in row else []
    parts += [f"push {row['push_s']:.2f} s"] if "push_s" in row else []
    parts += [f"replicas {row['num_replicas']}"] if "num_replicas" in row else []
    parts += [f"idle {row['trainer_idle_fraction']:.0%}"] if "trainer_idle_fraction" in row else []
    parts += [f"|dlogp| {row['dlogp_mean']:.1e} (max {row.get('dlogp_max', 0):.1e})"] if "dlogp_mean" in row else []
    parts += [f"{row['step_s']:.1f} s"] if "step_s" in row else []
    return "  ".join(parts)


def describe_validation(row: StepRow) -> str:
    """Describe one validation of supervised training in one line."""
    sets = {name.removeprefix("validation_loss_"): loss for name, loss in row.items() if "validation_loss_" in name}
    each = ", ".join(f"{name} {loss:.4f}" for name, loss in sets.items())
    return f"validation of step {row['step']}  loss {row['validation_loss']:.4f} ({each})  {row['validation_s']:.1f} s"


def describe_evaluation(row: StepRow) -> str:
    """Describe one evaluation in one line: each set's score and its standard error."""
    parts = [f"evaluation of step {row['step']}"]
    for name, found in row["sets"].items():
        parts.append(f"{name} {describe_score(found['score'])}")
    return "  ".join([*parts, f"{row['elapsed_s']:.1f} s"])


def describe_score(score: Mapping[str, Any] | None) -> str:
    """Describe the score of an evaluation set with its standard error."""
    if score is None:
        return "not played"
    error = "" if score["standard_error"] is None else f" ± {score['standard_error']:.3f}"
    return f"{score['value']:.3f}{error}"


def describe_waits(row: StepRow) -> str:
    """Describe how long the trainer computed in a step, and what it otherwise waited for, as far as it took time."""
    training = f"{row.get('train_s', 0):.1f} s training"
    waits = [f"{row[key]:.1f} s for {what}" for key, what in _WAITS if row.get(key, 0) >= _SHORTEST_WAIT_S]
    return f"{training}, waiting {', '.join(waits)}" if waits else training


def describe_run(rows: Sequence[StepRow]) -> list[str]:
    """Describe the run in lines: the course of the reward, and the outcomes of groups."""
    rewards = [reward_of(row) for row in rows if "reward_mean" in row]
    if not rewards:
        return ["no step was trained"]
    count = max(1, min(10, len(rewards) // 2))
    first, last = sum(rewards[:count]) / count, sum(rewards[-count:]) / count
    lines = [f"reward  first {count} steps {first:.3f}, last {count} steps {last:.3f} ({last - first:+.3f})"]
    counts = {kind: rows[-1][key] for kind in _GROUP_COUNTS if (key := f"num_{kind}_groups") in rows[-1]}
    indices = [index for row in rows for index in row.get("groups", [])]
    if indices:
        counts["trained twice"] = len(indices) - len(set(indices))
    if counts:
        lines.append("groups  " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    return lines
