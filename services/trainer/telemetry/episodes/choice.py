"""Chooses which groups of a batch are kept if not all are. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.records import Group

MAX_LEFT_OUT = 2
"""Groups of each kind that are kept of those that a step left out."""
MAX_EVALUATED = 2
"""Groups of each kind that are kept of an evaluation set, besides those that every evaluation keeps."""
NUM_COMPARED = 8
"""Rows of an evaluation set that every evaluation keeps, so that the same prompt can be read over versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A group of a batch, as far as the choice depends on it."""

    reward: float | None
    """Mean over its judged samples; None if there are none."""
    best_reward: float | None = None
    """Of its judged samples; None if there are none."""
    lowest: tuple[float, float] | None = None
    """Reward of its worst judged sample, then the mean, which decides between groups whose worst samples are equally
    bad; None if there are none."""
    oldest_version: int
    divergence: float | None
    """Largest difference between the trainer's and the engine's log-probability; None if it was not computed."""
    is_broken: bool
    """Whether one of its samples did not end by itself."""


def candidate(group: Group, divergence: float | None) -> Candidate:
    """Describe a group that was played."""
    rewards = [sample.reward for sample in group.samples if sample.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    return Candidate(
        reward=mean,
        best_reward=max(rewards, default=None),
        lowest=None if mean is None else (min(rewards), mean),
        oldest_version=group.oldest_version,
        divergence=divergence,
        is_broken=any(sample.finish_reason not in ("stop", "environment") for sample in group.samples),
    )


def is_compared(row: int, num_rows: int) -> bool:
    """Return whether every evaluation keeps this row of a set; such rows are evenly spread over it."""
    num = min(NUM_COMPARED, num_rows)
    return any(row == place * num_rows // num for place in range(num))


def evaluated_kind(evaluated: Candidate, *, pass_score: float) -> str:
    """Return what is wrong with a group of an evaluation; empty if nothing is.

    Args:
        evaluated: The group.
        pass_score: Smallest reward of a correct sample.
    """
    if evaluated.is_broken:
        return "cut off or failed"
    return "wrong" if evaluated.best_reward is not None and evaluated.best_reward < pass_score else ""


def choose(candidates: Sequence[Candidate], step: int) -> dict[int, list[str]]:
    """Return the numbers of the groups to keep, each with the reasons.

    Args:
        candidates: The batch.
        step: Number of the step; one group is kept in turn, whatever it is like.
    """
    chosen: dict[int, list[str]] = {}
    numbers = range(len(candidates))

    def keep(number: int, reason: str) -> None:
        chosen.setdefault(number, []).append(reason)

    rewarded = [(each.reward, number) for number, each in enumerate(candidates) if each.reward is not None]
    if rewarded:
        keep(max(rewarded)[1], "best")
    lowest = [(each.lowest, number) for number, each in enumerate(candidates) if each.lowest is not None]
    if lowest:
        keep(min(lowest)[1], "worst")
    if numbers:
        keep(min(numbers, key=lambda number: candidates[number].oldest_version), "oldest")
        keep(step % len(candidates), "in turn")
    diverged = [(each.divergence, number) for number, each in enumerate(candidates) if each.divergence is not None]
    if diverged:
        keep(max(diverged)[1], "most diverged")
    if broken := [number for number in numbers if candidates[number].is_broken]:
        keep(broken[step % len(broken)], "cut off or failed")
    return dict(sorted(chosen.items()))
