"""Plots of docs/results.md."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.results.reading import Row, Run
from bench.results.tables import HELD_OUT, WINDOW
from services.trainer.telemetry.curves import reward_limits

_COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red")
_SMALLEST_GAP = 1e-9
"""Replaces smaller values, because a logarithmic axis has no place for 0."""


def draw_demo(runs: Mapping[int, Run], path: Path) -> None:
    """Draw reward and |train - rollout logprob| of each seed to a PNG at `path`."""
    plt = _pyplot()
    figure, (reward, gap) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for (seed, run), color in zip(runs.items(), _COLORS, strict=False):
        _draw(reward, run, "reward_mean", color=color, label=f"seed {seed}")
        _draw_scores(reward, run, color=color)
        gap.semilogy(*curve(run.rows, "dlogp_mean"), color=color, alpha=0.6, label=f"seed {seed}, mean of all tokens")
        same = curve(run.rows, "dlogp_max_current", at_least=_SMALLEST_GAP)
        gap.semilogy(*same, ".", color=color, markersize=3, label=f"seed {seed}, largest, same version")
    _limit_rewards(reward, runs.values())
    reward.set(xlabel="optimizer step")
    gap.set(xlabel="optimizer step", ylabel="|train - rollout logprob|, nats")
    gap.legend(loc="center right", fontsize="small")
    _save(figure, path)


def draw_sft(sft: Run, sft_then_grpo: Run, grpo: Run, path: Path) -> None:
    """Draw the losses of supervised training, and the reward of GRPO with and without it, to a PNG at `path`."""
    plt = _pyplot()
    figure, (loss, reward) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    _draw(loss, sft, "loss", color="tab:purple", label="training")
    validations = curve(sft.validations, "validation_loss")
    loss.plot(*validations, "o-", color="black", markersize=4, label="held-out pictures")
    loss.set(xlabel="supervised step", ylabel="loss, nats per token", ylim=(0, None))
    loss.legend(loc="upper right")
    for run, color, label in (
        (sft_then_grpo, _COLORS[1], "from the supervised model"),
        (grpo, _COLORS[0], "from the tiny model"),
    ):
        _draw(reward, run, "reward_mean", color=color, label=label)
        _draw_scores(reward, run, color=color)
    _limit_rewards(reward, (sft_then_grpo, grpo))
    reward.set(xlabel="GRPO step")
    _save(figure, path)


def draw_correction(runs: Mapping[str, Run], path: Path) -> None:
    """Draw reward, entropy, length and age of the runs to a PNG at `path`."""
    plt = _pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    panels = (
        ("reward_mean", "reward"),
        ("entropy", "entropy, nats"),
        ("sample_tokens_mean", "tokens of an answer"),
        ("token_lag_mean", "versions behind, mean of tokens"),
    )
    for axis, (key, name) in zip(axes.flat, panels, strict=True):
        for (label, run), color in zip(runs.items(), _COLORS, strict=False):
            _draw(axis, run, key, color=color, label=label)
        axis.set(ylabel=name)
    _limit_rewards(axes[0, 0], runs.values())
    axes[0, 1].set(ylim=(0, None))
    axes[1, 1].set(ylim=(0, None))
    for axis in axes[1]:
        axis.set(xlabel="optimizer step")
    _save(figure, path)


def curve(rows: Sequence[Row], key: str, *, at_least: float = -math.inf) -> tuple[list[int], list[float]]:
    """Return the steps that have the metric, and its values, raised to `at_least`."""
    found = [(row["step"], max(row[key], at_least)) for row in rows if key in row]
    return [step for step, _ in found], [value for _, value in found]


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and those before it, `WINDOW` in all; fewer at the beginning."""
    return [statistics.mean(values[max(0, end - WINDOW) : end]) for end in range(1, len(values) + 1)]


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _draw(axis: Any, run: Run, key: str, *, color: str, label: str) -> None:
    steps, values = curve(run.rows, key)
    axis.plot(steps, values, color=color, alpha=0.2)
    axis.plot(steps, smooth(values), color=color, label=label)


def _draw_scores(axis: Any, run: Run, *, color: str) -> None:
    """Draw the held-out score, with its standard error, at each evaluation."""
    found = [(row["step"], row["sets"][HELD_OUT]["score"]) for row in run.evaluations]
    steps, scores = [step for step, _ in found], [score for _, score in found]
    values, errors = ([score[name] for score in scores] for name in ("value", "standard_error"))
    axis.errorbar(steps, values, yerr=errors, fmt="D", color=color, markersize=5, markeredgecolor="black", capsize=3)


def _limit_rewards(axis: Any, runs: Iterable[Run]) -> None:
    rewards = [row["reward_mean"] for run in runs for row in run.rows]
    axis.set(ylabel=f"reward, mean of {WINDOW} steps", ylim=reward_limits(rewards))
    axis.legend(loc="lower right")


def _save(figure: Any, path: Path) -> None:
    for axis in figure.axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)
