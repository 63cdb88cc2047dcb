"""The group ledger: nothing lost, nothing twice, nothing stale, nothing acknowledged early, in any order of events."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.trainer.admission.gate import Gate
from services.trainer.admission.ledger import Arrival, GroupLedger, GroupStatus, LedgerCheckpoint

NUM_STEPS_LEFT = 10**6


def ledger_of(*, max_staleness: int = 0, groups_per_step: int = 1) -> GroupLedger[str, str]:
    """An empty ledger."""
    return GroupLedger(Gate(max_staleness=max_staleness, groups_per_step=groups_per_step))


def arrival(index: int, *, attempt: int = 0, version: int = 1, was_redelivered: bool = False) -> Arrival[str]:
    """A group of 7 tokens, all of one version."""
    return Arrival(
        index=index,
        attempt=attempt,
        oldest_version=version,
        newest_version=version,
        num_tokens=7,
        was_redelivered=was_redelivered,
        group=f"{index}/{attempt}",
    )


def restored(ledger: GroupLedger[str, str]) -> GroupLedger[str, str]:
    """What a trainer that starts from a checkpoint of this moment has."""
    return GroupLedger.from_state(json.loads(json.dumps(ledger.checkpoint().state)), ledger.gate)


def test_admits_up_to_the_bound_and_counts_indices_up() -> None:
    """(max_staleness + 1) * groups_per_step groups, in order, and not one more."""
    ledger = ledger_of(max_staleness=2, groups_per_step=3)
    assert ledger.num_admissible(NUM_STEPS_LEFT) == 9
    assert [ledger.admit(1).index for _ in range(9)] == list(range(9))
    assert ledger.num_admissible(NUM_STEPS_LEFT) == 0
    with pytest.raises(ValueError, match="the gate is full: 9 groups"):
        ledger.admit(1)


def test_a_group_passes_from_admission_to_a_checkpoint() -> None:
    """Each report changes the status, and the message is released only after the checkpoint."""
    ledger = ledger_of()
    seen = [ledger.status(0)]
    ledger.admit(1)
    seen.append(ledger.status(0))
    assert ledger.hold(arrival(0))
    ledger.keep_receipt(0, "message 11")
    seen.append(ledger.status(0))
    assert ledger.checkpoint().receipts == frozenset(), "it is in no checkpoint while it is only held"
    assert ledger.start_training(ledger.select(1).indices) == ["0/0"]
    seen.append(ledger.status(0))
    ledger.finish_training()
    seen.append(ledger.status(0))
    assert ledger.settle(ledger.checkpoint()) == ["message 11"]
    seen.append(ledger.status(0))
    assert seen == ["unadmitted", "admitted", "held", "training", "trained", "settled"]
    assert ledger.num_receipts == 0


def test_a_stale_group_is_admitted_again_before_any_other() -> None:
    """The lowest index first, as the attempt after the one that was stale, at the version published now."""
    ledger = ledger_of(groups_per_step=3)
    for _ in range(3):
        ledger.admit(1)
    ledger.hold(arrival(2))
    ledger.hold(arrival(0, attempt=4))
    assert {each.index for each in ledger.reject_stale(5)} == {0, 2}
    assert ledger.status(0) is GroupStatus.REJECTED
    admissions = [ledger.admit(5), ledger.admit(5)]
    assert [(a.index, a.attempt, a.version) for a in admissions] == [(0, 5, 5), (2, 1, 5)]
    assert (ledger.counts.rejected, ledger.counts.rejected_tokens) == (2, 14)


def test_tokens_of_a_version_that_was_never_published_are_stale() -> None:
    """The weights that sampled them were lost with an earlier trainer."""
    ledger = ledger_of(max_staleness=5)
    ledger.admit(2)
    ledger.hold(arrival(0, version=3))
    assert [each.index for each in ledger.reject_stale(2)] == [0]


@pytest.mark.parametrize("outcome", [GroupStatus.FAILED, GroupStatus.FILTERED])
def test_a_dropped_group_makes_room_for_the_next_prompt(outcome: GroupStatus) -> None:
    """Failed and filtered groups are counted apart, and neither is admitted again."""
    ledger = ledger_of()
    ledger.admit(1)
    assert ledger.drop(0, 0, outcome)  # type: ignore[arg-type]
    assert ledger.status(0) is outcome
    assert ledger.admit(1).index == 1
    counts = ledger.counts
    assert (counts.failed, counts.filtered) == ((1, 0) if outcome is GroupStatus.FAILED else (0, 1))


def test_a_failure_does_not_replace_an_attempt_in_hand() -> None:
    """What is held can still be trained."""
    ledger = ledger_of()
    ledger.admit(1)
    ledger.hold(arrival(0))
    assert not ledger.drop(0, 1, GroupStatus.FAILED)
    assert ledger.status(0) is GroupStatus.HELD


def test_duplicates_and_attempts_given_up_are_not_wanted() -> None:
    """A copy is refused while its group is held, in training and afterwards; so is an attempt that was given up."""
    ledger = ledger_of(groups_per_step=2)
    ledger.admit(1), ledger.admit(1)
    assert ledger.wants(0, 0)
    assert ledger.wants(0, 1), "a trainer that died had admitted a later attempt"
    ledger.hold(arrival(0)), ledger.hold(arrival(1))
    assert not ledger.hold(arrival(0))
    ledger.start_training([0, 1])
    assert not ledger.hold(arrival(0, attempt=3))
    ledger.finish_training()
    assert not ledger.hold(arrival(0))
    ledger.settle(ledger.checkpoint())
    assert not ledger.hold(arrival(0))
    ledger.admit(2)
    ledger.hold(arrival(2))
    ledger.reject_stale(9)
    assert not ledger.wants(2, 0)
    assert ledger.wants(2, 1)


def test_groups_of_a_trainer_that_died_wait_for_their_admission() -> None:
    """They are not played again; one that failed is dropped as soon as it is admitted."""
    ledger = ledger_of(groups_per_step=2)
    assert ledger.hold(arrival(1))
    assert ledger.drop(0, 0, GroupStatus.FAILED)
    ledger.keep_receipt(1, "held"), ledger.keep_receipt(0, "failed")
    assert ledger.checkpoint().receipts == frozenset(), "no state knows of them"
    assert (ledger.status(0), ledger.status(1)) == ("unadmitted", "unadmitted")
    ledger.admit(1), ledger.admit(1)
    assert (ledger.status(0), ledger.status(1)) == ("failed", "held")
    assert ledger.unplayed() == []
    assert ledger.settle(ledger.checkpoint()) == ["failed"]


def test_what_is_sampled_again_is_counted() -> None:
    """Groups and tokens: after a rejection, after a redelivery to another worker, and after a loss."""
    ledger = ledger_of(groups_per_step=4)
    for _ in range(4):
        ledger.admit(1)
    ledger.hold(arrival(0))
    ledger.hold(arrival(1, was_redelivered=True))
    ledger.hold(arrival(2, attempt=1))
    assert (ledger.counts.redrawn, ledger.counts.redrawn_tokens) == (2, 14)
    (lost,) = ledger.readmit_lost(2)
    assert (lost.index, lost.attempt, lost.version) == (3, 1, 2)
    ledger.hold(arrival(3, attempt=1))
    assert (ledger.counts.redrawn, ledger.counts.lost) == (3, 1)


def test_a_group_whose_images_are_gone_is_admitted_again() -> None:
    """As the next attempt, whether its loss is known before its admission or after; its message is released."""
    ledger = ledger_of(groups_per_step=2)
    assert ledger.lose(1, 3), "a trainer that died had admitted it"
    assert not ledger.lose(1, 3)
    ledger.keep_receipt(1, "early")
    assert ledger.checkpoint().receipts == frozenset(), "no state knows of it"
    ledger.admit(1)
    assert ledger.admit(1).attempt == 4
    assert ledger.lose(0, 0)
    ledger.keep_receipt(0, "late")
    assert (ledger.status(0), ledger.num_untrained) == (GroupStatus.REJECTED, 1)
    assert not ledger.wants(0, 0)
    assert ledger.settle(ledger.checkpoint()) == ["early", "late"]
    assert restored(ledger).admit(2).attempt == 1
    assert ledger.counts.lost == 2


def test_a_loss_does_not_replace_an_attempt_in_hand() -> None:
    """What is held can still be trained."""
    ledger = ledger_of()
    ledger.admit(1)
    ledger.hold(arrival(0))
    assert not ledger.lose(0, 1)
    assert ledger.status(0) is GroupStatus.HELD


def test_a_smaller_bound_after_a_restart_admits_nothing_until_enough_is_trained() -> None:
    """The checkpoint's groups stay admitted."""
    ledger = ledger_of(max_staleness=1, groups_per_step=2)
    for _ in range(4):
        ledger.admit(1)
    state = ledger.checkpoint().state
    smaller = GroupLedger[str, str].from_state(state, Gate(max_staleness=0, groups_per_step=2))
    assert (smaller.num_untrained, smaller.num_admissible(NUM_STEPS_LEFT)) == (4, 0)


def test_misuse_is_an_error() -> None:
    """A batch is trained alone, of groups in hand, and not while a checkpoint is taken."""
    ledger = ledger_of(max_staleness=1)
    ledger.admit(1), ledger.admit(1)
    ledger.hold(arrival(0)), ledger.hold(arrival(1))
    with pytest.raises(ValueError, match=r"\[7\] are not held"):
        ledger.start_training([0, 7])
    ledger.start_training([0])
    for call in (lambda: ledger.start_training([1]), ledger.checkpoint):
        with pytest.raises(ValueError, match=r"\(0,\) are being trained"):
            call()


@dataclass(frozen=True)
class Message:
    """A finished group on the bus, as the model of the test sees it."""

    index: int
    attempt: int
    version: int
    is_sound: bool
    has_images: bool


KINDS = st.sampled_from([(True, True), (False, True), (True, False)])
"""Of messages: sound with its images, or without one of the two."""


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
        self.batch: list[Message] = []
        self.readmissions_due: dict[int, int] = {}
        self.lost_early: dict[int, int] = {}  # index -> next attempt; not admitted yet
        self.saved = self._save()
        self.pending: LedgerCheckpoint | None = None
        self.next_message = 0

    def _save(self) -> tuple[LedgerCheckpoint, set[int], set[int], dict[int, int]]:
        return self.ledger.checkpoint(), set(self.trained), set(self.dropped), dict(self.readmissions_due)

    def _publish(self, index: int, attempt: int) -> None:
        self.prompts.append((index, attempt, self.version))

    @rule()
    def admit(self) -> None:
        """Fill the gate."""
        while self.ledger.num_admissible(NUM_STEPS_LEFT):
            admission = self.ledger.admit(self.version)
            due = self.readmissions_due.pop(admission.index, None)
            assert admission.attempt == (self.lost_early.pop(admission.index, 0) if due is None else due)
            status = self.ledger.status(admission.index)
            if status is GroupStatus.ADMITTED:
                self._publish(admission.index, admission.attempt)
            elif status is GroupStatus.FAILED:
                self.dropped.add(admission.index)

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
        elif self.ledger.drop(message.index, message.attempt, GroupStatus.FAILED) and before is GroupStatus.ADMITTED:
            self.dropped.add(message.index)
        self.ledger.keep_receipt(message.index, number)

    @precondition(lambda self: not self.batch)
    @rule()
    def start_step(self) -> None:
        """Reject what is stale, and train if a batch is there."""
        for stale in self.ledger.reject_stale(self.version):
            assert self.version - stale.oldest_version > 1 or stale.newest_version > self.version
            assert stale.index not in self.readmissions_due
            self.readmissions_due[stale.index] = stale.attempt + 1
        indices = self.ledger.select(self.version).indices
        if indices:
            self.batch = self.ledger.start_training(indices)
            assert len(self.batch) == 2
            for message in self.batch:
                assert 0 <= self.version - message.version <= 1, "stale"
                assert message.is_sound
                assert message.has_images

    @precondition(lambda self: self.batch)
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
        _, trained, dropped, _ = self.saved
        for number in self.ledger.settle(self.pending):
            message = self.messages.pop(number)
            restored: GroupLedger[Message, int] = GroupLedger.from_state(self.pending.state, self.ledger.gate)
            assert message.index in trained | dropped or not restored.wants(message.index, message.attempt), (
                "acknowledged before a checkpoint accounted for it"
            )
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
        checkpoint, trained, dropped, readmissions_due = self.saved
        state = json.loads(json.dumps(checkpoint.state))
        self.ledger = GroupLedger.from_state(state, Gate(max_staleness=1, groups_per_step=2))
        assert self.ledger.checkpoint().state == checkpoint.state, "the state does not survive the round trip"
        self.trained, self.dropped, self.readmissions_due = set(trained), set(dropped), dict(readmissions_due)
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
        ended = {GroupStatus.TRAINED, GroupStatus.FAILED, GroupStatus.SETTLED}
        next_index = max([*self.trained, *self.dropped, *self.readmissions_due, -1]) + 1
        in_batch = {message.index for message in self.batch}
        for index in range(next_index + 3):
            status = self.ledger.status(index)
            assert (status in ended) == (index in self.trained | self.dropped)
            assert (status is GroupStatus.REJECTED) == (index in self.readmissions_due)
            assert (status is GroupStatus.TRAINING) == (index in in_batch)
        assert self.ledger.counts.trained == len(self.trained)
        assert self.ledger.counts.failed == len(self.dropped)

    @invariant()
    def what_is_awaited_can_come(self) -> None:
        """Every unplayed group is on the bus as a prompt or as a group that is wanted."""
        coming = {(index, attempt) for index, attempt, _ in self.prompts}
        coming |= {(self.messages[number].index, self.messages[number].attempt) for number in self.undelivered}
        for admission in self.ledger.unplayed():
            assert any(index == admission.index and attempt >= admission.attempt for index, attempt in coming)


Histories.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestHistories = Histories.TestCase
