"""Curves of a run: reward, tool use, staleness, |train - rollout logprob| over steps; loss in supervised training."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_DRAWN: Final = frozenset(
    {
        *("step", "loss", "validation_loss", "reward_mean", "first_turn_accuracy"),
        *("staleness_mean", "staleness_max", "max_staleness", "dlogp_mean", "dlogp_max", "dlogp_max_current"),
    }
)
_TOOL_USE: Final = "/tool_use"
"""End of the names of environments' metrics that are drawn, too."""
_SMOOTH_STEPS = 10
_SMALLEST_GAP = 1e-9
"""Smaller gaps are drawn as this one, because a logarithmic axis cannot show 0."""


def is_drawn(name: str) -> bool:
    """Return whether a metric is drawn; rows need no other ones."""
    return name in _DRAWN or name.endswith(_TOOL_USE)


def draw_curves(rows: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Draw the metrics of a run (rows of metrics.jsonl) to a PNG at `path`.

    A curve skips the steps that lack its metric: a step that trained no token has no log-probabilities.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    episodes = sorted({name for row in rows for name in row if name.endswith(_TOOL_USE)})
    num_axes = 4 if episodes else 3
    figure, axes = plt.subplots(num_axes, 1, figsize=(8, 3 * num_axes), sharex=True, layout="constrained")
    reward, staleness, gap = axes[0], axes[-2], axes[-1]
    figure.suptitle(title)

    steps, values = _curve(rows, "reward_mean")
    reward.plot(steps, values, color="tab:blue", alpha=0.35, label="each step")
    reward.plot(steps, _smooth(values), color="tab:blue", label=f"mean of {_SMOOTH_STEPS} steps")
    reward.set(ylabel="reward", ylim=reward_limits(values))
    reward.legend(loc="lower right")

    for name in episodes:
        axes[1].plot(*_curve(rows, name), label=f"samples that used a tool ({name.split('/')[1]})")
    if episodes:
        axes[1].plot(*_curve(rows, "first_turn_accuracy"), color="tab:gray", label="right in the first turn")
        axes[1].set(ylabel="share of samples", ylim=(0, 1.02))
        axes[1].legend(loc="center right")

    staleness.plot(*_curve(rows, "staleness_max"), color="tab:red", label="oldest group")
    staleness.plot(*_curve(rows, "staleness_mean"), color="tab:orange", label="mean")
    if bounds := _curve(rows, "max_staleness")[1]:
        staleness.axhline(bounds[-1], color="black", linestyle=":", label="bound")
    staleness.set(ylabel="staleness (versions)", ylim=(0, None))
    staleness.legend(loc="lower right")

    gap.semilogy(*_curve(rows, "dlogp_max", at_least=_SMALLEST_GAP), color="tab:red", label="largest")
    gap.semilogy(*_curve(rows, "dlogp_mean", at_least=_SMALLEST_GAP), color="tab:green", label="mean")
    same = [row for row in rows if row.get("dlogp_max_current")]
    if same:
        label = "largest, tokens of the current version"
        gap.semilogy(*_curve(same, "dlogp_max_current"), ".", color="black", label=label)
    gap.set(xlabel="optimizer step", ylabel="|train - rollout logprob|")
    gap.legend(loc="center right")

    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_loss_curves(
    rows: Sequence[dict[str, Any]], validations: Sequence[dict[str, Any]], path: Path, *, title: str
) -> None:
    """Draw the losses of supervised training (rows of metrics.jsonl and validation.jsonl) to a PNG at `path`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    figure.suptitle(title)
    steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
    axis.plot(steps, losses, color="tab:blue", alpha=0.35, label="each batch")
    axis.plot(steps, _smooth(losses), color="tab:blue", label=f"mean of {_SMOOTH_STEPS} batches")
    if validations:
        measured = [row["step"] for row in validations], [row["validation_loss"] for row in validations]
        axis.plot(*measured, "o-", color="tab:orange", label="validation")
    axis.set(xlabel="optimizer step", ylabel="loss (nats per token)", ylim=(0, None))
    axis.legend(loc="upper right")
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def reward_limits(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the limits of the reward axis: 0 to 1, extended to the rewards of a wider profile (dapo: -1 to 1)."""
    return 1.02 * min([0.0, *rewards]), 1.02 * max([1.0, *rewards])


def _curve(rows: Sequence[dict[str, Any]], name: str, *, at_least: float = -math.inf) -> tuple[list[int], list[float]]:
    """Return the steps that have the metric, and its values."""
    found = [(row["step"], max(row[name], at_least)) for row in rows if name in row]
    return [step for step, _ in found], [value for _, value in found]


def _smooth(values: Sequence[float]) -> list[float]:
    windows = (values[max(0, end - _SMOOTH_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
