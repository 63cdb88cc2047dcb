"""The ledger's records of prompt groups, as plain values; only `GroupLedger` changes them."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

GroupT = TypeVar("GroupT")


class GroupStatus(enum.StrEnum):
    """Status of a group."""

    UNADMITTED = "unadmitted"
    ADMITTED = "admitted"
    """On the bus or with a worker."""
    HELD = "held"
    """Finished and in hand, waiting for its batch."""
    TRAINING = "training"
    """In the batch of the current optimizer step."""
    REJECTED = "rejected"
    """Stale, or without its images; its prompt waits to be admitted again."""
    TRAINED = "trained"
    """Trained, but not yet in a checkpoint."""
    FILTERED = "filtered"
    """Left out of training on purpose, but not yet in a checkpoint. Another prompt takes its place."""
    FAILED = "failed"
    """Could not be played, judged or read, and not yet in a checkpoint. Another prompt takes its place."""
    SETTLED = "settled"
    """Trained, filtered or failed, and in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A group that may be played."""

    index: int
    """Position in the run's order of admission, from 0."""
    attempt: int
    """0, and one more each time the group is admitted again."""
    version: int
    """Announced policy version at admission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival(Generic[GroupT]):
    """A finished group."""

    index: int
    attempt: int
    """Its own attempt, or a later one that failed, was filtered or was lost."""
    oldest_version: int
    """The oldest policy version that produced one of its tokens."""
    newest_version: int
    """The newest such version."""
    num_tokens: int
    """The policy's own tokens, over all samples."""
    was_redelivered: bool = False
    """Whether a worker had already begun to play the prompt."""
    affected: Mapping[str, int] = field(default_factory=dict)
    """Numbers of its samples that each filter affected."""
    group: GroupT


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A group that will not be trained, and why."""

    attempt: int
    outcome: Literal[GroupStatus.FAILED, GroupStatus.FILTERED]
    reason: str = ""
    """Name of the filter."""
    num_tokens: int = 0
    """The policy's own tokens in the group, if it was filtered."""
    affected: Mapping[str, int] = field(default_factory=dict)
    """Numbers of its samples that each filter affected, if it was filtered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCheckpoint:
    """A copy of the ledger's state; pass it to `settle` once it is on disk."""

    state: dict[str, Any]
    """Input of `GroupLedger.from_state`, as plain data for JSON."""
    receipts: frozenset[int]
    """Numbers of the receipts whose messages the state accounts for."""
    ended: frozenset[int]
    """Groups that the state counts as trained, filtered or failed."""


@dataclass(slots=True, kw_only=True)
class GroupCounts:
    """Counts of groups by outcome, since the run began."""

    trained: int = 0
    rejected: int = 0
    """Stale, and therefore admitted again."""
    rejected_tokens: int = 0
    """The policy's own tokens in rejected groups: shows whether long answers are the ones that are lost."""
    failed: int = 0
    filtered: int = 0
    filtered_tokens: int = 0
    """The policy's own tokens in filtered groups: the cost of filtering."""
    filtered_by_reason: dict[str, int] = field(default_factory=dict)
    """Groups that each filter left out."""
    affected: dict[str, int] = field(default_factory=dict)
    """Samples of trained and filtered groups that each filter affected."""
    lost: int = 0
    """Admitted again because they, or their images, are gone from the bus."""
    redrawn: int = 0
    """Sampled more than once: admitted again, or redelivered to another worker."""
    redrawn_tokens: int = 0
    """The policy's own tokens in redrawn groups."""

    def add_trained(self, arrival: Arrival[Any]) -> None:
        """Count a group that was trained, and its samples."""
        self.trained += 1
        self._add_samples(arrival.affected)

    def add_dropped(self, dropped: Dropped) -> None:
        """Count a group that failed or was filtered; of the latter, its samples too."""
        if dropped.outcome is GroupStatus.FAILED:
            self.failed += 1
            return
        self.filtered += 1
        self.filtered_tokens += dropped.num_tokens
        self.filtered_by_reason[dropped.reason] = self.filtered_by_reason.get(dropped.reason, 0) + 1
        self._add_samples(dropped.affected)

    def _add_samples(self, affected: Mapping[str, int]) -> None:
        for name, count in affected.items():
            self.affected[name] = self.affected.get(name, 0) + count
