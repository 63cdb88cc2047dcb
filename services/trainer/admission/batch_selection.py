"""Selects the finished groups that a step may take, so that no group ever goes stale by waiting.

A group whose oldest token has version o may be trained at published version c only if c - o <= max_staleness. Its
*deadline* is therefore o + max_staleness; while it is still being played, o is at least its version at admission.

Invariant, for groups_per_step = B, n_k = untrained groups with a deadline of at most c + k (*prefix* k), and k >= 0:

    n_k <= (k + 1) B                                                                                (feasible)

This is Hall's condition for every group to have room in a coming step, each of which takes B. It holds at the start, as
at most (max_staleness + 1) B groups are admitted and a new one has the deadline c + max_staleness. A batch keeps it if
it has at least need_k = max(0, n_k - k B) groups of each prefix k: at most k B groups of the prefix then remain, the
condition at version c + 1, where the same deadlines are one step nearer. In particular at most B groups are ever due
(k = 0). While a group is being played its deadline only moves later.

Groups are *committed* to the batch as they finish, those of earliest deadline first, and stay in it. A set C of groups
may be committed if it leaves enough room:

    |C outside prefix k| <= B - need_k   for every k                                                (open)

- It is necessary and sufficient. If it fails for a k, there is room for fewer than need_k groups of prefix k, whatever
  arrives later. If it holds, filling the batch by earliest deadline completes it: the batch then has
  min(n_k, B - |C outside prefix k|) groups of prefix k, at least need_k.
- It remains true until the step ends. Versions of finished groups are fixed, unfinished groups move to later prefixes
  only, and a group that fails or is filtered leaves them. Only an admission makes an n_k larger. A group admitted at
  version a has the deadline a + max_staleness, so it is only in prefixes k >= max_staleness - (c - a).
  The gate keeps the room of c - a steps free, so at most (max_staleness + 1 - (c - a)) B groups are outstanding. For
  these k therefore n_k <= (k + 1) B - |C outside prefix k|, and (open) holds.
- There is always something to wait for. Suppose the batch is incomplete, and let k be the first prefix without spare
  room. All remaining room is for prefix k, which has as many uncommitted groups. None of these is finished:
  otherwise it could be committed, because no earlier prefix blocks it.
- Committing at once delays nothing. The open sets are the independent sets of a laminar matroid, because the prefixes
  are nested. So the groups committed early can be extended to a full batch from any set of finished groups that
  contains one: the batch is complete at the same moment as if the choice were made at the end.

Looking one step ahead only (due groups first, then whatever finished first) is not enough: with max_staleness = 2 and
B = 1, training a fresh group 3 before groups 1 and 2, admitted earlier, leaves two groups due and room for one.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The groups that a step can commit next, and those that it waits for."""

    indices: tuple[int, ...] = ()
    """Groups to commit, in order of index."""
    is_complete: bool = False
    """Whether they fill the batch."""
    waiting_for: tuple[int, ...] = ()
    """Unfinished groups, the most urgent first; one of them must finish before the batch can be full. Empty if fewer
    groups than a batch are admitted and all of them are finished."""


def select_groups(
    finished: Mapping[int, int],
    outstanding: Mapping[int, int],
    committed: Collection[int] = (),
    *,
    version: int,
    max_staleness: int,
    groups_per_step: int,
) -> Selection:
    """Choose the groups that can be committed to the batch that trains the published `version`.

    With `max_staleness` 0, every finished group can be committed.

    Args:
        finished: Version of the oldest token of each admitted group in hand, committed ones included. Stale groups must
            have been rejected.
        outstanding: Version at admission of every group that is admitted and not yet trained, finished ones included.
        committed: Groups that are already in the batch.
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
    spare = _num_spare(slack, committed, groups_per_step)
    chosen: list[int] = []
    for index in sorted(finished.keys() - set(committed), key=lambda index: (slack[index], index)):
        earlier = [k for k in spare if k < slack[index]]
        if len(committed) + len(chosen) == groups_per_step or any(spare[k] <= 0 for k in earlier):
            break
        chosen.append(index)
        spare.update((k, spare[k] - 1) for k in earlier)
    if len(committed) + len(chosen) == groups_per_step:
        return Selection(indices=tuple(sorted(chosen)), is_complete=True)
    last = next((k for k in sorted(spare) if spare[k] <= 0), max(spare, default=0))
    unfinished = [index for index in outstanding.keys() - finished.keys() if slack[index] <= last]
    return Selection(
        indices=tuple(sorted(chosen)),
        waiting_for=tuple(sorted(unfinished, key=lambda index: (slack[index], index))),
    )


def _num_spare(slack: Mapping[int, int], committed: Collection[int], groups_per_step: int) -> dict[int, int]:
    """Return for each prefix how many more groups from outside it the batch can take."""
    spare = {}
    for k in set(slack.values()):
        num_in_prefix = sum(steps <= k for steps in slack.values())
        num_needed = min(groups_per_step, max(0, num_in_prefix - k * groups_per_step))
        spare[k] = groups_per_step - num_needed - sum(slack[index] > k for index in committed)
    return spare
