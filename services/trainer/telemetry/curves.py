"""Curves of a run: reward, staleness and |train - rollout logprob| over steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SMOOTH_STEPS = 10


def draw_curves(rows: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Draw the metrics of a run (rows of metrics.jsonl) to a PNG at `path`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    steps = [row["step"] for row in rows]
    figure, (reward, staleness, gap) = plt.subplots(3, 1, figsize=(8, 9), sharex=True, layout="constrained")
    figure.suptitle(title)

    values = [row["reward_mean"] for row in rows]
    reward.plot(steps, values, color="tab:blue", alpha=0.35, label="each step")
    reward.plot(steps, _smooth(values), color="tab:blue", label=f"mean of {_SMOOTH_STEPS} steps")
    reward.set(ylabel="reward", ylim=reward_limits(values))
    reward.legend(loc="lower right")

    staleness.plot(steps, [row["staleness_max"] for row in rows], color="tab:red", label="oldest group")
    staleness.plot(steps, [row["staleness_mean"] for row in rows], color="tab:orange", label="mean")
    staleness.axhline(rows[-1]["max_staleness"] if rows else 0, color="black", linestyle=":", label="bound")
    staleness.set(ylabel="staleness (versions)", ylim=(0, None))
    staleness.legend(loc="lower right")

    gap.semilogy(steps, [max(row["dlogp_max"], 1e-9) for row in rows], color="tab:red", label="largest")
    gap.semilogy(steps, [max(row["dlogp_mean"], 1e-9) for row in rows], color="tab:green", label="mean")
    same = [(row["step"], row["dlogp_max_current"]) for row in rows if row.get("dlogp_max_current")]
    if same:
        gap.semilogy(*zip(*same, strict=True), ".", color="black", label="largest, tokens of the current version")
    gap.set(xlabel="optimizer step", ylabel="|train - rollout logprob|")
    gap.legend(loc="center right")

    for axis in (reward, staleness, gap):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def reward_limits(rewards: Sequence[float]) -> tuple[float, float]:
    """The ends of the reward's axis: 0 to 1, or as far beyond as a profile's scale goes (dapo: -1 to 1)."""
    return 1.02 * min([0.0, *rewards]), 1.02 * max([1.0, *rewards])


def _smooth(values: Sequence[float]) -> list[float]:
    windows = (values[max(0, end - _SMOOTH_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
