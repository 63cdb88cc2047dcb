"""Which finished groups make the next batch, so that no group ever goes stale by waiting.

A group whose oldest token has version o may be trained at published version c only if c - o <= max_staleness. Its
*deadline* is therefore o + max_staleness; while it is still being played, o is at least its version at admission.

Invariant, for groups_per_step = B and n_k = untrained groups with a deadline of at most c + k:

    n_k <= (k + 1) B   for every k >= 0                                                             (feasible)

This is Hall's condition for giving every group one of the B places of each coming step. It holds at the start, because
at most (max_staleness + 1) B groups are admitted and a new one has the deadline c + max_staleness. A batch keeps it if
it has at least n_k - k B groups of each prefix k: at most k B groups of the prefix then remain, the condition at
version c + 1, where the same deadlines are one step nearer. In particular at most B groups are ever due (k = 0).
While a group is being played its deadline only moves later. Taking finished groups by earliest deadline maximises every
prefix at once: if that choice breaks a prefix, every choice does, and the trainer must wait for an unfinished group of
that prefix.

Looking one step ahead only (due groups first, then whatever finished first) is not enough: with max_staleness = 2 and
B = 1, training a fresh group 3 before groups 1 and 2, admitted earlier, leaves two groups due for one place.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The next batch, or the groups to wait for. Both are empty if fewer groups than a batch are admitted."""

    indices: tuple[int, ...] = ()
    """The batch, in order of index; empty: wait."""
    waiting_for: tuple[int, ...] = ()
    """Unfinished groups one of which must finish first, the most urgent first."""


def select_batch(
    finished: Mapping[int, int],
    outstanding: Mapping[int, int],
    *,
    version: int,
    max_staleness: int,
    groups_per_step: int,
) -> Selection:
    """Choose the batch that trains the published `version`, or say which groups it waits for.

    With `max_staleness` 0 the batch is exactly the groups admitted at `version`.

    Args:
        finished: Version of the oldest token of each admitted group in hand. Stale groups must have been rejected.
        outstanding: Version at admission of every group that is admitted and not yet trained, finished ones included.
        version: The published policy version.
        max_staleness: Most versions that a group may lag when it is trained.
        groups_per_step: Size of a batch.

    Raises:
        ValueError: a finished group is not admitted, or is stale.
    """
    if unknown := finished.keys() - outstanding.keys():
        raise ValueError(f"finished groups {sorted(unknown)} are not admitted")
    if stale := [index for index, oldest in finished.items() if version - oldest > max_staleness]:
        raise ValueError(f"finished groups {sorted(stale)} are stale at version {version}")

    slack = {  # steps that a group can still wait; it would be negative only for a group that a restart made late
        index: max(0, finished.get(index, admitted) + max_staleness - version)
        for index, admitted in outstanding.items()
    }
    chosen = sorted(finished, key=lambda index: (slack[index], index))[:groups_per_step]
    unfinished = sorted(outstanding.keys() - finished.keys(), key=lambda index: (slack[index], index))
    for k in sorted(set(slack.values())):
        num_in_prefix = sum(steps <= k for steps in slack.values())
        num_needed = min(groups_per_step, num_in_prefix - k * groups_per_step)
        if sum(slack[index] <= k for index in chosen) < num_needed:
            return Selection(waiting_for=tuple(index for index in unfinished if slack[index] <= k))
    if len(chosen) < groups_per_step:
        return Selection(waiting_for=tuple(unfinished))
    return Selection(indices=tuple(sorted(chosen)))
