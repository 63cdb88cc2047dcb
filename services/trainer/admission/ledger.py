"""The ledger: the status of every prompt group, and the bus messages that it accounts for.

It is the only owner of group state. The feeder, the collector and the training loop query it and report to it; nothing
else changes the status of a group. It is pure: groups and receipts are opaque to it.

    unadmitted -> admitted -> held -> training -> trained -> settled
                   ^  |  |     |
                   |  |  +-----+-> rejected (its images are gone, or it is stale; waits to be admitted again)
                   |  +-> failed, filtered -> settled              |
                   +-----------------------------------------------+

A group is filtered before it is held: when it arrives, or, if its prompt cannot be played, when it is admitted.

Invariants:
- each index has exactly one status;
- admitted, held and training groups together never exceed the gate's capacity, unless a restart made it smaller;
- an index is trained at most once, and never with a stale group;
- each rejection leads to exactly one further admission;
- a filtered group is never trained and never admitted again: the next index takes its place;
- a receipt is released only by a checkpoint whose state accounts for its message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Generic, Self, TypeVar

from services.trainer.admission.batch_selection import Selection, select_groups
from services.trainer.admission.gate import Gate
from services.trainer.admission.group_state import (
    Admission,
    Arrival,
    Dropped,
    GroupCounts,
    GroupStatus,
    LedgerCheckpoint,
)

GroupT = TypeVar("GroupT")
ReceiptT = TypeVar("ReceiptT")


class GroupLedger(Generic[GroupT, ReceiptT]):
    """The status of every group of a run."""

    def __init__(self, gate: Gate) -> None:
        """Start with nothing admitted."""
        self.gate = gate
        self.counts = GroupCounts()
        self._next_index = 0
        self._admissions: dict[int, Admission] = {}  # admitted, held or training
        self._training: dict[int, Arrival[GroupT]] = {}  # in the batch of the current step
        self._rejected: dict[int, int] = {}  # index -> next attempt
        self._ended: dict[int, GroupStatus] = {}  # not yet in a checkpoint
        # Arrivals of groups that are not admitted (yet) come from a trainer that died after its last checkpoint.
        self._arrivals: dict[int, Arrival[GroupT]] = {}
        self._dropped_early: dict[int, Dropped] = {}
        self._lost_early: dict[int, int] = {}  # index -> next attempt
        self._redrawn: dict[int, list[int]] = {}  # index -> tokens counted in `counts` of messages that may come again
        self._receipts: dict[int, tuple[int, ReceiptT]] = {}  # number -> index and receipt
        self._next_receipt = 0

    # Questions

    def status(self, index: int) -> GroupStatus:
        """Return the status of a group."""
        if index in self._admissions:
            if index in self._training:
                return GroupStatus.TRAINING
            return GroupStatus.HELD if index in self._arrivals else GroupStatus.ADMITTED
        if index in self._rejected:
            return GroupStatus.REJECTED
        if index in self._ended:
            return self._ended[index]
        return GroupStatus.SETTLED if index < self._next_index else GroupStatus.UNADMITTED

    def wants(self, index: int, attempt: int) -> bool:
        """Return whether this attempt at a group is useful: not a duplicate, and not an attempt that was given up.

        An attempt later than the admitted one is useful. So is a group that is not admitted yet: a trainer that died
        after its last checkpoint had admitted it.
        """
        if index in self._training:
            return False
        if index in self._arrivals and self._arrivals[index].attempt >= attempt:
            return False
        if index in self._dropped_early and self._dropped_early[index].attempt >= attempt:
            return False
        if index in self._lost_early and self._lost_early[index] > attempt:
            return False
        if index in self._admissions:
            return attempt >= self._admissions[index].attempt
        if index in self._rejected:
            return attempt >= self._rejected[index]
        return index >= self._next_index

    @property
    def num_untrained(self) -> int:
        """Groups admitted and not yet trained."""
        return len(self._admissions)

    @property
    def num_committed(self) -> int:
        """Groups in the batch of the current step."""
        return len(self._training)

    @property
    def next_index(self) -> int:
        """The first index that was never admitted."""
        return self._next_index

    @property
    def has_rejected(self) -> bool:
        """Whether a rejected group waits to be admitted again; it goes before any new group."""
        return bool(self._rejected)

    def num_admissible(self, num_steps_left: int, *, num_steps_ahead: int = 0) -> int:
        """Return how many more groups the gate admits; see `Gate.num_admissible`."""
        return self.gate.num_admissible(
            self.num_untrained, num_steps_left=num_steps_left, num_steps_ahead=num_steps_ahead
        )

    def unplayed(self) -> list[Admission]:
        """Return the groups that are admitted and not in hand, in order of index."""
        return [
            self._admissions[index]
            for index in sorted(self._admissions)
            if index not in self._arrivals and index not in self._training
        ]

    # Admission

    def admit(self, version: int) -> Admission:
        """Admit the next group at the announced `version`; rejected groups go first, the lowest index first.

        Play the group only if its status is then `ADMITTED`: it may already have arrived or failed.

        Raises:
            ValueError: the gate is full.
        """
        if self.num_untrained >= self.gate.capacity:
            raise ValueError(f"the gate is full: {self.gate.capacity} groups are admitted and untrained")
        if self._rejected:
            index = min(self._rejected)
            attempt = self._rejected.pop(index)
        else:
            index, attempt = self._next_index, self._lost_early.pop(self._next_index, 0)
            self._next_index += 1
        admission = Admission(index=index, attempt=attempt, version=version)
        self._admissions[index] = admission
        if index in self._dropped_early:
            self._end(index, self._dropped_early.pop(index))
        return admission

    def renew_unplayed(self, version: int) -> list[Admission]:
        """Move every unplayed group to the announced `version`, keeping its attempt: a restart sends all of them again.

        Otherwise they would count as due, and the first batch would wait for all of them.
        """
        renewed = [
            Admission(index=admission.index, attempt=admission.attempt, version=max(version, admission.version))
            for admission in self.unplayed()
        ]
        self._admissions.update((admission.index, admission) for admission in renewed)
        return renewed

    def readmit_lost(self, version: int) -> list[Admission]:
        """Admit every unplayed group again at the announced `version`, because the bus no longer holds any of them."""
        lost = [
            Admission(index=admission.index, attempt=admission.attempt + 1, version=version)
            for admission in self.unplayed()
        ]
        self._admissions.update((admission.index, admission) for admission in lost)
        self.counts.lost += len(lost)
        return lost

    # Arrival

    def hold(self, arrival: Arrival[GroupT]) -> bool:
        """Take a finished group in hand; return False and ignore it if it is not wanted."""
        if not self.wants(arrival.index, arrival.attempt):
            return False
        self._arrivals[arrival.index] = arrival
        self._dropped_early.pop(arrival.index, None)
        if arrival.attempt > 0 or arrival.was_redelivered:
            self._count_redrawn(arrival.index, arrival.num_tokens)
        return True

    def fail(self, index: int, attempt: int) -> bool:
        """Record that a group cannot be played, judged or read; return False if it is not wanted.

        An earlier attempt that is in hand is kept: it can still be trained.
        """
        return self._drop(index, Dropped(attempt=attempt, outcome=GroupStatus.FAILED))

    def filter_out(
        self,
        index: int,
        attempt: int,
        *,
        reason: str,
        num_tokens: int = 0,
        affected: Mapping[str, int] = {},
        was_redelivered: bool = False,
    ) -> bool:
        """Record that a group is left out on purpose; return False if it is not wanted.

        This is not a failure, and its prompt does not come back: the next one takes its place. An earlier attempt that
        is in hand is kept.

        Args:
            index: Index of the group.
            attempt: Attempt that was filtered.
            reason: The filter's name, under which it is counted.
            num_tokens: The policy's own tokens, over all samples; 0 if it was not played.
            affected: Numbers of its samples that each filter affected; none if it was not played.
            was_redelivered: Whether a worker had already begun to play the prompt.
        """
        dropped = Dropped(
            attempt=attempt, outcome=GroupStatus.FILTERED, reason=reason, num_tokens=num_tokens, affected=affected
        )
        if not self._drop(index, dropped):
            return False
        if num_tokens and (attempt > 0 or was_redelivered):
            self._count_redrawn(index, num_tokens)
        return True

    def lose(self, index: int, attempt: int) -> bool:
        """Record that a group's images are gone; return False if it is not wanted.

        It waits to be admitted again, like a stale group. An earlier attempt that is in hand is kept.
        """
        if not self.wants(index, attempt) or self._is_in_hand(index, attempt):
            return False
        self._dropped_early.pop(index, None)
        if index in self._admissions or index in self._rejected:
            self._admissions.pop(index, None)
            self._rejected[index] = attempt + 1
            self._redrawn.pop(index, None)
        else:
            self._lost_early[index] = attempt + 1
        self.counts.lost += 1
        return True

    def keep_receipt(self, index: int, receipt: ReceiptT) -> None:
        """Keep the receipt of a message about a group until `settle` releases it.

        Report the group's outcome first: a checkpoint taken in between would account for the message too early.
        """
        self._receipts[self._next_receipt] = (index, receipt)
        self._next_receipt += 1

    @property
    def num_receipts(self) -> int:
        """Messages in hand."""
        return len(self._receipts)

    # Training

    def reject_stale(self, version: int) -> list[Arrival[GroupT]]:
        """Reject the groups in hand that may not train the weights of `version`, and return them."""
        stale = [
            arrival
            for index, arrival in self._arrivals.items()
            if self.status(index) is GroupStatus.HELD
            and self.gate.is_stale(
                oldest_version=arrival.oldest_version, newest_version=arrival.newest_version, version=version
            )
        ]
        for arrival in stale:
            del self._arrivals[arrival.index]
            admission = self._admissions.pop(arrival.index)
            self._rejected[arrival.index] = max(arrival.attempt, admission.attempt) + 1
            self._redrawn.pop(arrival.index, None)
            self.counts.rejected += 1
            self.counts.rejected_tokens += arrival.num_tokens
        return stale

    def select(self, version: int) -> Selection:
        """Choose the groups to commit to the batch that trains the weights of `version`, and those that it waits for.

        Raises:
            ValueError: a group in hand is stale; call `reject_stale` first.
        """
        in_hand = {**self._arrivals, **self._training}
        return select_groups(
            {index: arrival.oldest_version for index, arrival in in_hand.items() if index in self._admissions},
            {index: admission.version for index, admission in self._admissions.items()},
            self._training.keys(),
            version=version,
            max_staleness=self.gate.max_staleness,
            groups_per_step=self.gate.groups_per_step,
        )

    def held(self, indices: Sequence[int]) -> list[GroupT]:
        """Return groups in hand that are not committed, in the order given."""
        return [self._arrivals[index].group for index in indices]

    def commit(self, indices: Sequence[int]) -> list[GroupT]:
        """Move held groups into the current step's batch, and return them in the order given.

        Raises:
            ValueError: the batch would be too large, or one of the groups is not held.
        """
        if (num_groups := len(self._training) + len(indices)) > self.gate.groups_per_step:
            raise ValueError(f"a batch of {num_groups} groups, of at most {self.gate.groups_per_step}")
        if wrong := [index for index in indices if self.status(index) is not GroupStatus.HELD]:
            raise ValueError(f"groups {wrong} are not held")
        self._training.update((index, self._arrivals.pop(index)) for index in indices)
        return [self._training[index].group for index in indices]

    def finish_training(self) -> None:
        """Record that the batch was trained, which frees its groups' room in the gate."""
        for index, arrival in self._training.items():
            del self._admissions[index]
            self._ended[index] = GroupStatus.TRAINED
            self.counts.add_trained(arrival)
            self._redrawn.pop(index, None)
        self._training = {}

    def abort_training(self) -> None:
        """Record that the batch was not trained, and hold its groups again."""
        self._arrivals.update(self._training)
        self._training = {}

    # Checkpoints

    def checkpoint(self) -> LedgerCheckpoint:
        """Return the ledger's part of a checkpoint.

        A group that is in hand but not trained is in no checkpoint, so its messages stay on the bus.

        Raises:
            ValueError: a batch is being trained.
        """
        if self._training:
            raise ValueError(f"groups {sorted(self._training)} are being trained")
        only_here = self._arrivals.keys() | self._dropped_early.keys() | self._lost_early.keys()
        again = [tokens for index in only_here for tokens in self._redrawn.get(index, ())]
        counts = replace(
            self.counts,
            redrawn=self.counts.redrawn - len(again),  # counted when their messages come again
            redrawn_tokens=self.counts.redrawn_tokens - sum(again),
        )
        self._redrawn = {index: tokens for index, tokens in self._redrawn.items() if index in only_here}
        return LedgerCheckpoint(
            state={
                "next_index": self._next_index,
                "admitted": [[a.index, a.attempt, a.version] for a in self._admissions.values()],
                "rejected": sorted([index, attempt] for index, attempt in self._rejected.items()),
                "counts": asdict(counts),
            },
            receipts=frozenset(number for number, (index, _) in self._receipts.items() if index not in only_here),
            ended=frozenset(self._ended),
        )

    def settle(self, checkpoint: LedgerCheckpoint) -> list[ReceiptT]:
        """Record that a checkpoint is on disk, and return the receipts of the messages to acknowledge."""
        for index in checkpoint.ended:
            del self._ended[index]
        return [self._receipts.pop(number)[1] for number in sorted(checkpoint.receipts)]

    @classmethod
    def from_state(cls, state: Mapping[str, Any], gate: Gate) -> Self:
        """Restore a checkpoint's state. The gate may differ: a smaller one admits nothing until enough is trained."""
        ledger = cls(gate)
        ledger.counts = GroupCounts(**state["counts"])
        ledger._next_index = state["next_index"]
        ledger._admissions = {
            index: Admission(index=index, attempt=attempt, version=version)
            for index, attempt, version in state["admitted"]
        }
        ledger._rejected = dict(state["rejected"])
        return ledger

    def _drop(self, index: int, dropped: Dropped) -> bool:
        if not self.wants(index, dropped.attempt) or self._is_in_hand(index, dropped.attempt):
            return False
        if index in self._admissions:
            self._end(index, dropped)
        else:
            self._dropped_early[index] = dropped
        return True

    def _is_in_hand(self, index: int, attempt: int) -> bool:
        """Return whether the group is in hand; its attempt becomes this one, so that a readmission comes after both."""
        if index not in self._arrivals:
            return False
        self._arrivals[index] = replace(self._arrivals[index], attempt=attempt)
        return True

    def _end(self, index: int, dropped: Dropped) -> None:
        del self._admissions[index]
        self._ended[index] = dropped.outcome
        self.counts.add_dropped(dropped)

    def _count_redrawn(self, index: int, num_tokens: int) -> None:
        self.counts.redrawn += 1
        self.counts.redrawn_tokens += num_tokens
        self._redrawn.setdefault(index, []).append(num_tokens)
