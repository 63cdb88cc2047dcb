"""The gate and the batch selection: nothing lost, nothing twice, nothing stale, whatever finishes when."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.admission.batch_selection import select_batch
from services.trainer.admission.gate import Gate


def due(gate: Gate, version: int, finished: dict[int, int]) -> list[int]:
    """The groups that the next version would make stale."""
    oldest = {index: finished.get(index, admission.version) for index, admission in gate.outstanding.items()}
    return [index for index in oldest if oldest[index] <= version - gate.max_staleness]


def test_admits_up_to_the_bound_and_counts_indices_up() -> None:
    """(max_staleness + 1) * groups_per_step groups, in order, and not one more."""
    gate = Gate(max_staleness=2, groups_per_step=3)
    assert gate.num_admissible() == gate.capacity == 9
    assert [gate.admit(1).index for _ in range(9)] == list(range(9))
    assert gate.num_admissible() == 0
    with pytest.raises(ValueError, match="the gate is full: 9 groups"):
        gate.admit(1)


def test_admits_no_more_than_the_run_can_still_train() -> None:
    """Near the end, nothing is played in vain."""
    gate = Gate(max_staleness=3, groups_per_step=2)
    gate.admit(1)
    assert gate.num_admissible(num_steps_left=2) == 3
    assert gate.num_admissible(num_steps_left=0) == 0


def test_training_frees_places_only_for_what_is_outstanding() -> None:
    """An index that is not outstanding changes nothing."""
    gate = Gate(max_staleness=0, groups_per_step=2)
    gate.admit(1), gate.admit(1)
    with pytest.raises(KeyError, match=r"\[7\]"):
        gate.trained([0, 7])
    assert set(gate.outstanding) == {0, 1}
    gate.trained([0, 1])
    assert (gate.num_admissible(), gate.num_trained) == (2, 2)


def test_rejected_group_goes_to_the_front_of_the_line_with_the_next_attempt() -> None:
    """Before any new index, the lowest first, and admitted at the version of now."""
    gate = Gate(max_staleness=0, groups_per_step=3)
    for _ in range(3):
        gate.admit(1)
    gate.rejected(2, 0)
    gate.rejected(0, 4)
    admissions = [gate.admit(5), gate.admit(5)]
    assert [(a.index, a.attempt, a.version) for a in admissions] == [(0, 5, 5), (2, 1, 5)]
    gate.dropped(1)
    assert gate.admit(5).index == 3
    assert (gate.num_rejected, gate.num_dropped) == (2, 1)


def test_standing_tells_wanted_early_and_done_groups_apart() -> None:
    """A duplicate is done; what a dead trainer had admitted beyond its checkpoint is early, or a later attempt."""
    gate = Gate(max_staleness=0, groups_per_step=2)
    gate.admit(1), gate.admit(1)
    assert gate.standing(0, 0) == gate.standing(0, 1) == "outstanding"
    assert gate.standing(2, 0) == "early"
    gate.rejected(0, 0)
    assert (gate.standing(0, 0), gate.standing(0, 1)) == ("done", "early")
    gate.admit(2)
    assert (gate.standing(0, 0), gate.standing(0, 1)) == ("done", "outstanding")
    gate.trained([1])
    assert gate.standing(1, 0) == "done"


def test_zero_staleness_takes_exactly_the_admitted_groups_in_order() -> None:
    """However they finish, the batch is the B admitted groups, by index."""
    outstanding = {3: 7, 1: 7, 2: 7}
    waiting = select_batch({3: 7, 1: 7}, outstanding, version=7, max_staleness=0, groups_per_step=3)
    assert (waiting.indices, waiting.waiting_for) == ((), (2,))
    ready = select_batch({3: 7, 2: 7, 1: 7}, outstanding, version=7, max_staleness=0, groups_per_step=3)
    assert (ready.indices, ready.waiting_for) == ((1, 2, 3), ())


def test_waits_for_a_due_group_even_when_enough_others_are_finished() -> None:
    """Group 0 is due; a batch without it would make it stale."""
    selection = select_batch({1: 4, 2: 4}, {0: 3, 1: 4, 2: 4, 3: 4}, version=4, max_staleness=1, groups_per_step=2)
    assert selection.waiting_for == (0,)


def test_looks_further_ahead_than_one_step() -> None:
    """Training 3 now would leave 1 and 2 due for the one place of the next step (the module's example)."""
    selection = select_batch({3: 1}, {1: 0, 2: 0, 3: 1}, version=1, max_staleness=2, groups_per_step=1)
    assert selection.waiting_for == (1, 2)


def test_fresh_tokens_move_a_deadline() -> None:
    """A group admitted long ago but played by a newer version is not urgent."""
    selection = select_batch({0: 4, 1: 3}, {0: 3, 1: 3}, version=4, max_staleness=1, groups_per_step=1)
    assert selection.indices == (1,)


def test_refuses_what_is_stale_or_unknown() -> None:
    """Both are errors of the caller, not something to train."""
    with pytest.raises(ValueError, match=r"\[0\] are stale at version 5"):
        select_batch({0: 3}, {0: 3}, version=5, max_staleness=1, groups_per_step=1)
    with pytest.raises(ValueError, match=r"\[9\] are not outstanding"):
        select_batch({9: 3}, {0: 3}, version=3, max_staleness=1, groups_per_step=1)


@settings(max_examples=300, deadline=None)
@given(
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    is_refilled_late=st.booleans(),
)
def test_no_group_is_ever_lost_trained_twice_or_stale(
    max_staleness: int, groups_per_step: int, seed: int, is_refilled_late: bool
) -> None:
    """Any order of finishing: the bound holds, at most a batch is due, nothing is stale, every wait can end."""
    rng = random.Random(seed)
    gate = Gate(max_staleness=max_staleness, groups_per_step=groups_per_step)
    version, finished, trained = 1, {}, []
    for _ in range(12):
        while True:
            while gate.num_admissible() and not (is_refilled_late and rng.random() < 0.3):
                gate.admit(version)
            assert len(gate.outstanding) <= gate.capacity
            assert len(due(gate, version, finished)) <= groups_per_step
            selection = gate.select(finished, version)
            if selection.indices:
                break
            unfinished = sorted(set(gate.outstanding) - set(finished))
            assert set(selection.waiting_for) <= set(unfinished)
            if unfinished:
                index = rng.choice(unfinished)  # anything may finish next, urgent or not
                finished[index] = rng.randint(gate.outstanding[index].version, version)
            if rng.random() < 0.1:
                gate = Gate.from_state(
                    json.loads(json.dumps(gate.state())),
                    max_staleness=max_staleness,
                    groups_per_step=groups_per_step,
                )
        assert len(selection.indices) == groups_per_step
        assert all(version - finished[index] <= max_staleness for index in selection.indices)
        assert set(due(gate, version, finished)) <= set(selection.indices)
        gate.trained(selection.indices)
        trained += selection.indices
        for index in selection.indices:
            del finished[index]
        version += 1
        assert all(version - oldest <= max_staleness for oldest in finished.values())
    assert len(set(trained)) == len(trained) == 12 * groups_per_step == gate.num_trained
    assert set(trained) | set(gate.outstanding) == set(range(gate.state()["next_index"]))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), jump=st.integers(1, 6))
def test_survives_rejections_and_a_restart_that_makes_everything_late(seed: int, jump: int) -> None:
    """After a jump of the version, stale groups are rejected, played again, and every index is trained once."""
    rng = random.Random(seed)
    gate = Gate(max_staleness=1, groups_per_step=2)
    version, finished, trained, attempts = 1, {}, [], {}
    for step in range(10):
        if step == 4:
            version += jump
        for index in [i for i, oldest in finished.items() if version - oldest > 1]:
            del finished[index]
            gate.rejected(index, attempts[index])
        while not (selection := gate.select(finished, version)).indices:
            while gate.num_admissible():
                admission = gate.admit(version)
                assert attempts.get(admission.index, -1) < admission.attempt
                attempts[admission.index] = admission.attempt
            unfinished = sorted(set(gate.outstanding) - set(finished))
            index = rng.choice(unfinished)
            oldest = rng.randint(gate.outstanding[index].version, version)
            if version - oldest > 1:
                gate.rejected(index, attempts[index])
            else:
                finished[index] = oldest
        gate.trained(selection.indices)
        trained += selection.indices
        for index in selection.indices:
            del finished[index]
        version += 1
    assert len(set(trained)) == len(trained) == 20
    waiting = {index for index, _ in gate.state()["rejected"]}
    assert set(trained) | set(gate.outstanding) | waiting == set(range(gate.state()["next_index"]))
