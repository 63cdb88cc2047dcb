"""GroupLedger: what becomes of each group."""

import json
from collections.abc import Callable

import pytest

from services.trainer.admission.gate import Gate
from services.trainer.admission.group_state import Arrival, GroupStatus
from services.trainer.admission.ledger import GroupLedger
from tests.support.trainer.ledger import NUM_STEPS_LEFT, restored


def ledger_of(*, max_staleness: int = 0, groups_per_step: int = 1) -> GroupLedger[str, str]:
    """An empty ledger."""
    return GroupLedger(Gate(max_staleness=max_staleness, groups_per_step=groups_per_step))


def arrival(index: int, *, attempt: int = 0, version: int = 1, was_redelivered: bool = False) -> Arrival[str]:
    """A group of 7 tokens, all of one version, with two samples that a filter masked."""
    return Arrival(
        index=index,
        attempt=attempt,
        oldest_version=version,
        newest_version=version,
        num_tokens=7,
        was_redelivered=was_redelivered,
        affected={"truncated_masked": 2},
        group=f"{index}/{attempt}",
    )


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
    assert ledger.commit(ledger.select(1).indices) == ["0/0"]
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
    assert ledger.fail(0, 0) if outcome is GroupStatus.FAILED else ledger.filter_out(0, 0, reason="zero_variance")
    assert ledger.status(0) is outcome
    assert ledger.admit(1).index == 1
    counts = ledger.counts
    assert (counts.failed, counts.filtered) == ((1, 0) if outcome is GroupStatus.FAILED else (0, 1))


def test_filtered_groups_are_counted_by_reason_over_a_restart() -> None:
    """With their tokens, and as sampled again if they were; a prompt that was never played costs none."""
    ledger = ledger_of(groups_per_step=4)
    for _ in range(4):
        ledger.admit(1)
    assert ledger.filter_out(0, 0, reason="zero_variance", num_tokens=7)
    assert ledger.filter_out(1, 0, reason="zero_variance", num_tokens=7, was_redelivered=True)
    assert ledger.filter_out(2, 1, reason="repetition", num_tokens=7)
    assert ledger.filter_out(3, 0, reason="overlong_prompt")
    assert not ledger.filter_out(3, 0, reason="overlong_prompt"), "once is enough"
    checkpoint = ledger.checkpoint()
    ledger.admit(1)
    ledger.filter_out(4, 0, reason="repetition", num_tokens=7)
    counts = GroupLedger[str, str].from_state(json.loads(json.dumps(checkpoint.state)), ledger.gate).counts
    assert (counts.filtered, counts.filtered_tokens) == (4, 21)
    assert counts.filtered_by_reason == {"zero_variance": 2, "repetition": 1, "overlong_prompt": 1}
    assert (counts.redrawn, counts.redrawn_tokens, counts.failed) == (2, 14, 0)


def test_affected_samples_are_counted_when_their_group_ends() -> None:
    """Trained or filtered, and once: groups in hand or not yet admitted come again after a restart."""
    before = ledger_of(groups_per_step=2)
    before.admit(1), before.admit(1)
    before.hold(arrival(0))
    before.filter_out(1, 0, reason="repetition", affected={"repetition_dropped": 3})
    before.filter_out(2, 0, reason="repetition", affected={"repetition_dropped": 5})
    after = restored(before)
    assert after.counts.affected == {"repetition_dropped": 3}
    after.filter_out(2, 0, reason="repetition", affected={"repetition_dropped": 5})
    after.admit(1)
    after.hold(arrival(0))
    after.commit([0])
    after.finish_training()
    state = after.checkpoint().state
    assert state["counts"].pop("affected") == {"repetition_dropped": 8, "truncated_masked": 2}
    assert GroupLedger[str, str].from_state(state, after.gate).counts.affected == {}, "of a version that counted none"


def test_a_filter_does_not_replace_an_attempt_in_hand() -> None:
    """What is held can still be trained."""
    ledger = ledger_of()
    ledger.admit(1)
    ledger.hold(arrival(0))
    assert not ledger.filter_out(0, 1, reason="zero_variance")
    assert ledger.status(0) is GroupStatus.HELD


def test_refilled_batches_are_of_the_published_version() -> None:
    """With max_staleness 0, the batch is groups admitted at the version, those in place of filtered ones included."""
    ledger = ledger_of(groups_per_step=3)
    for version in (1, 2, 3):
        played = []
        while not (selection := ledger.select(version)).is_complete:
            while ledger.num_admissible(NUM_STEPS_LEFT):
                played.append(ledger.admit(version))
            index = ledger.unplayed()[0].index
            if index % 3:
                ledger.filter_out(index, 0, reason="zero_variance", num_tokens=7)
            else:
                ledger.hold(arrival(index, version=version))
        assert [admission.version for admission in played] == [version] * len(played)
        assert set(selection.indices) < {admission.index for admission in played}, (
            "no admission is left over from before"
        )
        assert len(ledger.commit(selection.indices)) == 3
        ledger.finish_training()
    assert (ledger.counts.trained, ledger.num_untrained) == (9, 0)


@pytest.mark.parametrize("report", [GroupLedger.fail, GroupLedger.lose])
def test_a_failure_or_loss_does_not_replace_an_attempt_in_hand(report: Callable[[GroupLedger, int, int], bool]) -> None:
    """What is held can still be trained."""
    ledger = ledger_of()
    ledger.admit(1)
    ledger.hold(arrival(0))
    assert not report(ledger, 0, 1)
    assert ledger.status(0) is GroupStatus.HELD


def test_duplicates_and_attempts_given_up_are_not_wanted() -> None:
    """A copy is refused while its group is held, in training and afterwards; so is an attempt that was given up."""
    ledger = ledger_of(groups_per_step=2)
    ledger.admit(1), ledger.admit(1)
    assert ledger.wants(0, 0)
    assert ledger.wants(0, 1), "a trainer that died had admitted a later attempt"
    ledger.hold(arrival(0)), ledger.hold(arrival(1))
    assert not ledger.hold(arrival(0))
    ledger.commit([0, 1])
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
    assert ledger.fail(0, 0)
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


def test_what_comes_again_after_a_restart_is_counted_once() -> None:
    """Groups in hand are in no checkpoint, and their messages come again; what was rejected or trained is counted."""
    ledger = ledger_of(max_staleness=1, groups_per_step=1)
    ledger.admit(1), ledger.admit(1)
    ledger.hold(arrival(0, was_redelivered=True))
    ledger.hold(arrival(1, was_redelivered=True))
    assert restored(ledger).counts.redrawn == 0
    after = restored(ledger)
    after.hold(arrival(0, was_redelivered=True))
    assert (after.counts.redrawn, after.counts.redrawn_tokens) == (1, 7)
    ledger.commit([0])
    ledger.finish_training()
    assert (restored(ledger).counts.redrawn, restored(ledger).counts.redrawn_tokens) == (1, 7)
    ledger.reject_stale(9)
    assert (restored(ledger).counts.redrawn, restored(ledger).counts.redrawn_tokens) == (2, 14)
    assert ledger.counts.redrawn == 2


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


def test_a_failure_behind_a_stale_attempt_is_not_forgotten() -> None:
    """Its message is released with the rejection, so a later attempt is admitted, also after a restart."""
    ledger = ledger_of()
    ledger.admit(1)
    ledger.hold(arrival(0))
    for attempt, report in enumerate((ledger.fail, ledger.lose, ledger.fail), start=1):
        assert not report(0, attempt)
        ledger.keep_receipt(0, f"attempt {attempt}")
    ledger.reject_stale(5)
    assert restored(ledger).admit(5).attempt == 4
    assert ledger.settle(ledger.checkpoint()) == ["attempt 1", "attempt 2", "attempt 3"]


def test_a_smaller_bound_after_a_restart_admits_nothing_until_enough_is_trained() -> None:
    """The checkpoint's groups stay admitted."""
    ledger = ledger_of(max_staleness=1, groups_per_step=2)
    for _ in range(4):
        ledger.admit(1)
    state = ledger.checkpoint().state
    smaller = GroupLedger[str, str].from_state(state, Gate(max_staleness=0, groups_per_step=2))
    assert (smaller.num_untrained, smaller.num_admissible(NUM_STEPS_LEFT)) == (4, 0)


def test_misuse_is_an_error() -> None:
    """A batch has its size, is of groups in hand, and is not trained while a checkpoint is taken."""
    ledger = ledger_of(max_staleness=1)
    ledger.admit(1), ledger.admit(1)
    ledger.hold(arrival(0)), ledger.hold(arrival(1))
    with pytest.raises(ValueError, match=r"\[7\] are not held"):
        ledger.commit([7])
    ledger.commit([0])
    with pytest.raises(ValueError, match="a batch of 2 groups, of at most 1"):
        ledger.commit([1])
    with pytest.raises(ValueError, match=r"\[0\] are being trained"):
        ledger.checkpoint()


def test_a_batch_that_is_not_trained_goes_back() -> None:
    """Its groups are held again, a copy of them is still refused, and no checkpoint accounts for their messages."""
    ledger = ledger_of(groups_per_step=2)
    ledger.admit(1), ledger.admit(1)
    ledger.hold(arrival(0))
    ledger.keep_receipt(0, "message 11")
    ledger.commit([0])
    assert not ledger.wants(0, 0)
    ledger.abort_training()
    assert (ledger.status(0), ledger.wants(0, 0), ledger.counts.trained) == (GroupStatus.HELD, False, 0)
    assert ledger.checkpoint().receipts == frozenset()
    assert ledger.commit(ledger.select(1).indices) == ["0/0"]


def test_after_a_restart_the_first_batch_does_not_wait_for_all() -> None:
    """Its version is far ahead; groups that are sent again at it are as fresh as new ones, in the same attempt."""
    ledger = restored_with(ledger_of(max_staleness=3, groups_per_step=2), version=1)
    assert [(each.attempt, each.version) for each in ledger.renew_unplayed(9)] == [(0, 9)] * 8
    for index in (2, 5):
        ledger.hold(arrival(index, version=9))
    assert ledger.select(9).indices == (2, 5)
    assert ledger.renew_unplayed(9) == ledger.unplayed()


def restored_with(ledger: GroupLedger[str, str], *, version: int) -> GroupLedger[str, str]:
    """What a trainer has that starts from a checkpoint taken when the gate was full at `version`."""
    while ledger.num_admissible(NUM_STEPS_LEFT):
        ledger.admit(version)
    return restored(ledger)
