"""Counts recently filtered groups: for the step's metrics, and to end a run that filters nearly everything."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from penstock.errors import DataError
from services.trainer.admission.filters import FilterReason

WINDOW: Final = 256
"""Groups over which the filtered share is computed: enough that chance alone rarely exceeds the bound."""

_REMEDIES: Final = {
    FilterReason.ZERO_VARIANCE: (
        "the policy's answers to a prompt hardly ever differ in reward: take prompts that it solves sometimes, more "
        "trainer.samples_per_group, or filters.zero_variance = false"
    ),
    FilterReason.REPETITION: (
        "nearly all answers repeat themselves: look at the run's samples, the chat template and the sampling, or raise "
        "filters.max_compression_ratio"
    ),
    FilterReason.OVERLONG_PROMPT: (
        "prompts leave no room for answers: raise rollout.context_length or data.limits.max_tokens, or lower "
        "sampling.max_new_tokens"
    ),
    FilterReason.WRONG_ROW: (
        "rows of the data are wrong: `penstock data` lists them, and the trainer's log has those that cannot be sent"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The groups that reached the filters between two steps."""

    num_groups: int
    num_filtered: int
    rewards: tuple[float, ...]
    """Rewards of all their judged samples, before any filter."""


@dataclass(slots=True, kw_only=True)
class FilterTally:
    """Counts groups as they reach the filters."""

    max_share: float
    """`filters.max_filtered_share`."""
    _recent: deque[FilterReason | None] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _since: list[FilterReason | None] = field(default_factory=list)
    _rewards: list[float] = field(default_factory=list)

    def keep(self, rewards: Iterable[float | None], *, is_of_this_start: bool = True) -> None:
        """Count a group that passed, with the rewards of its samples.

        Those of an earlier start of the trainer count for the metrics only.
        """
        self._count(None, rewards)
        if is_of_this_start:
            self._recent.append(None)

    def filter_out(
        self, reason: FilterReason, rewards: Iterable[float | None] = (), *, is_of_this_start: bool = True
    ) -> None:
        """Count a group that was filtered, with the rewards of its samples if it was played.

        Those of an earlier start of the trainer count for the metrics only.

        Raises:
            DataError: too large a share of the last groups was filtered.
        """
        self._count(reason, rewards)
        if not is_of_this_start:
            return
        self._recent.append(reason)
        if len(self._recent) < WINDOW:
            return
        counts = Counter(each for each in self._recent if each is not None)
        if counts.total() > self.max_share * WINDOW:
            found = ", ".join(f"{each} {count}" for each, count in counts.most_common())
            [(most, _)] = counts.most_common(1)
            raise DataError(
                f"{counts.total()} of the last {WINDOW} groups were filtered ({found}), more than "
                f"filters.max_filtered_share = {self.max_share:g}; {_REMEDIES[most]}"
            )

    def take(self) -> Interval:
        """Return the counts since the last call."""
        interval = Interval(
            num_groups=len(self._since),
            num_filtered=sum(reason is not None for reason in self._since),
            rewards=tuple(self._rewards),
        )
        self._since.clear()
        self._rewards.clear()
        return interval

    def _count(self, reason: FilterReason | None, rewards: Iterable[float | None]) -> None:
        self._since.append(reason)
        self._rewards += [reward for reward in rewards if reward is not None]
