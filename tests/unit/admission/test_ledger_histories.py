"""GroupLedger under random histories: its invariants hold whatever comes."""

import json
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.trainer.admission.gate import Gate
from services.trainer.admission.group_state import Arrival, GroupStatus, LedgerCheckpoint
from services.trainer.admission.ledger import GroupLedger
from tests.support.trainer.ledger import NUM_STEPS_LEFT


@dataclass(frozen=True)
class Message:
    """A finished group on the bus, as the model of the test sees it."""

    index: int
    attempt: int
    version: int
    is_sound: bool
    has_images: bool
    is_filtered: bool


KINDS = st.sampled_from([(True, True, False), (False, True, False), (True, False, False), (True, True, True)])
"""Of messages: sound with its images, or without one of the two, or left out by a filter."""


class Histories(RuleBasedStateMachine):
    """A run with workers, a bus, checkpoints and crashes, in any order; the model beside it keeps its own books."""

    def __init__(self) -> None:
        """Start before anything is admitted."""
        super().__init__()
        self.version = 1
        self.ledger: GroupLedger[Message, int] = GroupLedger(Gate(max_staleness=1, groups_per_step=2))
        self.prompts: list[tuple[int, int, int]] = []  # index, attempt, version at admission
        self.messages: dict[int, Message] = {}  # on the bus, delivered or not
        self.undelivered: list[int] = []
        self.trained: set[int] = set()  # of the surviving history
        self.dropped: set[int] = set()
        self.filtered: set[int] = set()
        self.batch: list[Message] = []
        self.readmissions_due: dict[int, int] = {}
        self.lost_early: dict[int, int] = {}  # index -> next attempt; not admitted yet
        self.saved = self._save()
        self.pending: LedgerCheckpoint | None = None
        self.next_message = 0

    def _save(self) -> tuple[LedgerCheckpoint, set[int], set[int], set[int], dict[int, int]]:
        ended = set(self.trained), set(self.dropped), set(self.filtered)
        return self.ledger.checkpoint(), *ended, dict(self.readmissions_due)

    def _publish(self, index: int, attempt: int) -> None:
        self.prompts.append((index, attempt, self.version))

    @rule(num_overlong=st.integers(0, 2))
    def admit(self, num_overlong: int) -> None:
        """Fill the gate; prompts that are too long to be played are filtered at once."""
        while self.ledger.num_admissible(NUM_STEPS_LEFT):
            admission = self.ledger.admit(self.version)
            due = self.readmissions_due.pop(admission.index, None)
            assert admission.attempt == (self.lost_early.pop(admission.index, 0) if due is None else due)
            status = self.ledger.status(admission.index)
            if status is GroupStatus.ADMITTED and num_overlong:
                num_overlong -= 1
                assert self.ledger.filter_out(admission.index, admission.attempt, reason="overlong_prompt")
                self.filtered.add(admission.index)
            elif status is GroupStatus.ADMITTED:
                self._publish(admission.index, admission.attempt)
            elif status is GroupStatus.FAILED:
                self.dropped.add(admission.index)
            elif status is GroupStatus.FILTERED:
                self.filtered.add(admission.index)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def play(self, data: st.DataObject) -> None:
        """A worker finishes a prompt; it may be stored twice, be unreadable, or lose its images."""
        index, attempt, admitted = self.prompts.pop(data.draw(st.integers(0, len(self.prompts) - 1)))
        message = Message(index, attempt, data.draw(st.integers(admitted, self.version)), *data.draw(KINDS))
        for _ in range(data.draw(st.integers(1, 2))):
            self.messages[self.next_message] = message
            self.undelivered.append(self.next_message)
            self.next_message += 1

    @precondition(lambda self: self.undelivered)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """The collector takes a message from the bus."""
        self._take(data.draw(st.sampled_from(self.undelivered)))

    def _take(self, number: int) -> None:
        self.undelivered.remove(number)
        message = self.messages[number]
        wanted, before = self.ledger.wants(message.index, message.attempt), self.ledger.status(message.index)
        if not message.has_images:
            if self.ledger.lose(message.index, message.attempt):
                is_early = before is GroupStatus.UNADMITTED
                (self.lost_early if is_early else self.readmissions_due)[message.index] = message.attempt + 1
        elif message.is_filtered:
            is_new = self.ledger.filter_out(message.index, message.attempt, reason="zero_variance", num_tokens=1)
            if is_new and before is GroupStatus.ADMITTED:
                self.filtered.add(message.index)
        elif message.is_sound:
            found = Arrival(
                index=message.index,
                attempt=message.attempt,
                oldest_version=message.version,
                newest_version=message.version,
                num_tokens=1,
                group=message,
            )
            assert self.ledger.hold(found) == wanted
        elif self.ledger.fail(message.index, message.attempt) and before is GroupStatus.ADMITTED:
            self.dropped.add(message.index)
        self.ledger.keep_receipt(message.index, number)

    @precondition(lambda self: len(self.batch) < 2)
    @rule()
    def commit(self) -> None:
        """Reject what is stale, and train what is there."""
        for stale in self.ledger.reject_stale(self.version):
            assert self.version - stale.oldest_version > 1 or stale.newest_version > self.version
            assert stale.index not in self.readmissions_due
            self.readmissions_due[stale.index] = stale.attempt + 1
        selection = self.ledger.select(self.version)
        self.batch += self.ledger.commit(selection.indices)
        assert selection.is_complete == (len(self.batch) == 2)
        for message in self.batch:
            assert 0 <= self.version - message.version <= 1, "stale"
            assert message.is_sound
            assert message.has_images
            assert not message.is_filtered

    @precondition(lambda self: self.batch)
    @rule()
    def abort_step(self) -> None:
        """The run is stopped before the batch is there."""
        self.ledger.abort_training()
        self.batch = []

    @precondition(lambda self: len(self.batch) == 2)
    @rule()
    def end_step(self) -> None:
        """The step is taken and the next version published."""
        self.ledger.finish_training()
        for message in self.batch:
            assert message.index not in self.trained, "trained twice"
            self.trained.add(message.index)
        self.batch = []
        self.version += 1

    @precondition(lambda self: not self.batch)
    @rule()
    def begin_checkpoint(self) -> None:
        """The state of a moment; the checkpoint is on disk only later."""
        self.saving, self.pending = self._save(), self.ledger.checkpoint()

    @precondition(lambda self: self.pending is not None)
    @rule()
    def end_checkpoint(self) -> None:
        """It is on disk: its messages are acknowledged."""
        assert self.pending is not None
        self.saved = self.saving
        _, trained, dropped, filtered, _ = self.saved
        for number in self.ledger.settle(self.pending):
            message = self.messages.pop(number)
            restored: GroupLedger[Message, int] = GroupLedger.from_state(self.pending.state, self.ledger.gate)
            assert message.index in trained | dropped | filtered or not restored.wants(
                message.index, message.attempt
            ), "acknowledged before a checkpoint accounted for it"
        self.pending = None

    @precondition(lambda self: not self.prompts and not self.undelivered)
    @rule()
    def lose(self) -> None:
        """Nothing is on the bus: what is admitted and not in hand is gone."""
        for admission in self.ledger.readmit_lost(self.version):
            self._publish(admission.index, admission.attempt)

    @rule(has_caught_up=st.booleans())
    def crash(self, has_caught_up: bool) -> None:
        """The trainer dies and starts from its last checkpoint. What is unacknowledged comes again, soon or later."""
        checkpoint, trained, dropped, filtered, readmissions_due = self.saved
        state = json.loads(json.dumps(checkpoint.state))
        self.ledger = GroupLedger.from_state(state, Gate(max_staleness=1, groups_per_step=2))
        assert self.ledger.checkpoint().state == checkpoint.state, "the state does not survive the round trip"
        self.trained, self.dropped, self.filtered = set(trained), set(dropped), set(filtered)
        self.readmissions_due = dict(readmissions_due)
        self.batch, self.pending, self.lost_early = [], None, {}
        self.undelivered = sorted(self.messages)
        self.version += 2  # beyond the bound: what lost weights sampled is stale
        if has_caught_up:
            for number in list(self.undelivered):
                self._take(number)
        self.prompts = []
        for admission in self.ledger.unplayed():
            self._publish(admission.index, admission.attempt)

    @invariant()
    def the_gate_bounds_what_is_untrained(self) -> None:
        """Admitted, held and training groups never exceed the capacity."""
        assert self.ledger.num_untrained <= self.ledger.gate.capacity

    @invariant()
    def every_index_has_the_status_of_the_books(self) -> None:
        """No index is lost, and none is counted twice."""
        ended = {GroupStatus.TRAINED, GroupStatus.FAILED, GroupStatus.FILTERED, GroupStatus.SETTLED}
        books = self.trained | self.dropped | self.filtered
        next_index = max([*books, *self.readmissions_due, -1]) + 1
        in_batch = {message.index for message in self.batch}
        for index in range(next_index + 3):
            status = self.ledger.status(index)
            assert (status in ended) == (index in books)
            assert (status is GroupStatus.REJECTED) == (index in self.readmissions_due)
            assert (status is GroupStatus.TRAINING) == (index in in_batch)
        assert self.ledger.counts.trained == len(self.trained)
        assert self.ledger.counts.failed == len(self.dropped)
        assert self.ledger.counts.filtered == len(self.filtered) == sum(self.ledger.counts.filtered_by_reason.values())
        assert len(self.trained) + len(self.dropped) + len(self.filtered) == len(books), "an index has two fates"

    @invariant()
    def what_is_awaited_can_come(self) -> None:
        """Every unplayed group is on the bus as a prompt or as a group that is wanted."""
        coming = {(index, attempt) for index, attempt, _ in self.prompts}
        coming |= {(self.messages[number].index, self.messages[number].attempt) for number in self.undelivered}
        for admission in self.ledger.unplayed():
            assert any(index == admission.index and attempt >= admission.attempt for index, attempt in coming)


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestHistories = Histories.TestCase
