"""The ledger's records of prompt groups, as plain values; only `GroupLedger` changes them."""

import enum
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
    lost: int = 0
    """Admitted again because they, or their images, are gone from the bus."""
    redrawn: int = 0
    """Sampled more than once: admitted again, or redelivered to another worker."""
    redrawn_tokens: int = 0
    """The policy's own tokens in redrawn groups."""
