"""The gate and the batch selection: no group goes stale by waiting, whatever finishes when and is committed early."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.admission.batch_selection import Selection, select_groups
from services.trainer.admission.gate import Gate
from services.trainer.admission.group_state import Arrival, GroupStatus
from services.trainer.admission.ledger import GroupLedger

NUM_STEPS_LEFT = 10**6


def admit_all(ledger: GroupLedger[int, int], version: int) -> None:
    """Fill the gate."""
    while ledger.num_admissible(NUM_STEPS_LEFT):
        ledger.admit(version)


def finish(ledger: GroupLedger[int, int], index: int, version: int) -> None:
    """A group arrives, all of whose tokens are of one version."""
    (admission,) = [each for each in ledger.unplayed() if each.index == index]
    assert ledger.hold(
        Arrival(
            index=index,
            attempt=admission.attempt,
            oldest_version=version,
            newest_version=version,
            num_tokens=1,
            group=version,
        )
    )


def test_the_gate_admits_no_more_than_the_run_can_still_train() -> None:
    """Up to the bound; near the end, only what the steps left can train."""
    gate = Gate(max_staleness=3, groups_per_step=2)
    assert gate.num_admissible(1, num_steps_left=100) == 7
    assert gate.num_admissible(1, num_steps_left=2) == 3
    assert gate.num_admissible(1, num_steps_left=0) == 0
    assert gate.num_admissible(1, num_steps_left=100, num_steps_ahead=1) == 5, "the step's groups still count"
    assert gate.num_admissible(1, num_steps_left=2, num_steps_ahead=2) == 3


def test_the_gate_bounds_the_age_of_the_oldest_token() -> None:
    """And refuses tokens of a version that was never published."""
    gate = Gate(max_staleness=1, groups_per_step=2)
    assert not gate.is_stale(oldest_version=4, newest_version=5, version=5)
    assert gate.is_stale(oldest_version=3, newest_version=5, version=5)
    assert gate.is_stale(oldest_version=5, newest_version=6, version=5)


def test_zero_staleness_takes_exactly_the_admitted_groups() -> None:
    """However they finish, the batch is the B admitted groups, each of which can be committed at once."""
    outstanding = {3: 7, 1: 7, 2: 7}
    some = select_groups({3: 7, 1: 7}, outstanding, version=7, max_staleness=0, groups_per_step=3)
    assert some == Selection(indices=(1, 3), waiting_for=(2,))
    rest = select_groups({3: 7, 2: 7, 1: 7}, outstanding, (1, 3), version=7, max_staleness=0, groups_per_step=3)
    assert rest == Selection(indices=(2,), is_complete=True)


def test_waits_for_a_due_group_even_when_enough_others_are_finished() -> None:
    """Group 0 is due; a batch without it would make it stale. One other may be committed; room is kept for it."""
    outstanding = {0: 3, 1: 4, 2: 4, 3: 4}
    for committed, indices in (((), (1,)), ((1,), ())):
        selection = select_groups({1: 4, 2: 4}, outstanding, committed, version=4, max_staleness=1, groups_per_step=2)
        assert selection == Selection(indices=indices, waiting_for=(0,))


def test_looks_further_ahead_than_one_step() -> None:
    """Training 3 now would leave 1 and 2 due in the next step, which has room for one (the module's example)."""
    selection = select_groups({3: 1}, {1: 0, 2: 0, 3: 1}, version=1, max_staleness=2, groups_per_step=1)
    assert selection == Selection(waiting_for=(1, 2))


def test_fresh_tokens_move_a_deadline() -> None:
    """A group admitted long ago but played by a newer version is not urgent."""
    selection = select_groups({0: 4, 1: 3}, {0: 3, 1: 3}, version=4, max_staleness=1, groups_per_step=1)
    assert selection == Selection(indices=(1,), is_complete=True)


def test_a_full_batch_takes_no_more() -> None:
    """Not even a group that is due: it would be one too many, which the gate rules out."""
    selection = select_groups({0: 3, 1: 4}, {0: 3, 1: 4}, (1,), version=4, max_staleness=1, groups_per_step=1)
    assert selection == Selection(is_complete=True)


def test_refuses_what_is_stale_or_unknown() -> None:
    """Both are errors of the caller, not something to train."""
    with pytest.raises(ValueError, match=r"\[0\] are stale at version 5"):
        select_groups({0: 3}, {0: 3}, version=5, max_staleness=1, groups_per_step=1)
    with pytest.raises(ValueError, match=r"\[9\] are not admitted"):
        select_groups({9: 3}, {0: 3}, version=3, max_staleness=1, groups_per_step=1)


def could_be_complete(ledger: GroupLedger[int, int], in_hand: dict[int, int], version: int) -> bool:
    """Whether a batch could be chosen from all groups in hand, if none were committed."""
    admissions = {each.index: each.version for each in ledger.unplayed()} | in_hand
    gate = ledger.gate
    selection = select_groups(
        in_hand,
        admissions,
        version=version,
        max_staleness=gate.max_staleness,
        groups_per_step=gate.groups_per_step,
    )
    return selection.is_complete


@settings(max_examples=300)
@given(
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    is_refilled_late=st.booleans(),
    is_announced_late=st.booleans(),
    streams=st.booleans(),
)
def test_no_group_ever_goes_stale_by_waiting(
    max_staleness: int,
    groups_per_step: int,
    seed: int,
    is_refilled_late: bool,
    is_announced_late: bool,
    streams: bool,
) -> None:
    """Any order of finishing: at most a batch is due, nothing in hand is rejected, and every wait can end.

    The announcement of a version may take as long as collecting its batch, or come with the next version's. Groups may
    be committed whenever the trainer looks, or all together; a batch is complete at the same moment.
    """
    rng = random.Random(seed)
    ledger: GroupLedger[int, int] = GroupLedger(Gate(max_staleness=max_staleness, groups_per_step=groups_per_step))
    announced, version, trained = 1, 1, []
    in_hand: dict[int, int] = {}  # index -> version of its tokens
    for _ in range(12):
        while True:
            while ledger.num_admissible(NUM_STEPS_LEFT, num_steps_ahead=version - announced) and not (
                is_refilled_late and rng.random() < 0.3
            ):
                ledger.admit(announced)
            due = [each for each in ledger.unplayed() if each.version <= version - max_staleness]
            assert len(due) <= groups_per_step
            assert ledger.reject_stale(version) == []
            selection = ledger.select(version)
            assert selection.is_complete == could_be_complete(ledger, in_hand, version)
            if selection.is_complete:
                break
            if streams and rng.random() < 0.5:
                ledger.commit(selection.indices)
            unplayed = ledger.unplayed()
            assert set(selection.waiting_for) <= {each.index for each in unplayed}
            assert selection.waiting_for or ledger.num_untrained < groups_per_step
            if not (is_announced_late and unplayed and rng.random() < 0.8):
                announced = version  # at the latest when there is nothing else to wait for
            if unplayed:
                each = rng.choice(unplayed)  # anything may finish next, urgent or not
                in_hand[each.index] = rng.randint(each.version, version)  # engines may have what is not announced yet
                finish(ledger, each.index, in_hand[each.index])
        ledger.commit(selection.indices)
        batch = [index for index in in_hand if ledger.status(index) is GroupStatus.TRAINING]
        assert len(batch) == groups_per_step
        assert all(version - in_hand.pop(index) <= max_staleness for index in batch)
        ledger.finish_training()
        trained += batch
        announced = announced if is_announced_late else version + 1
        announced, version = max(announced, version), version + 1  # one push is under way at most
    assert len(set(trained)) == len(trained) == 12 * groups_per_step


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), jump=st.integers(1, 6))
def test_a_jump_of_the_version_delays_groups_but_loses_none(seed: int, jump: int) -> None:
    """As after a crash: stale groups are rejected and played again, and every index is trained once."""
    rng = random.Random(seed)
    ledger: GroupLedger[int, int] = GroupLedger(Gate(max_staleness=1, groups_per_step=2))
    version, trained = 1, []
    for step in range(10):
        if step == 4:
            version += jump
        while True:
            ledger.reject_stale(version)
            admit_all(ledger, version)
            if (selection := ledger.select(version)).is_complete:
                break
            each = rng.choice(ledger.unplayed())
            finish(ledger, each.index, rng.randint(each.version, version))
        ledger.commit(selection.indices)
        ledger.finish_training()
        trained += selection.indices
        version += 1
    assert len(set(trained)) == len(trained) == 20
    assert set(trained) <= set(range(24))
