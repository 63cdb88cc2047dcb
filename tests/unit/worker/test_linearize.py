"""Sessions to sequences: every sampled token once, behind exactly what it was sampled behind."""

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.records import SessionCall, TokenSequence, VersionSpan
from services.rollout.worker.agents.linearize import linearize, turns_of

A, B = "a" * 64, "b" * 64


def call(
    input_ids: Sequence[int],
    output_ids: Sequence[int],
    *,
    continues: int = 0,
    images: Sequence[str] = (),
    versions: Sequence[tuple[int, int]] = (),
) -> SessionCall:
    """A call whose n-th token has log-probability -(its id) / 8."""
    spans = versions or [(len(output_ids), 1)]
    return SessionCall(
        request_id="q",
        choice=0,
        continues=continues,
        conversation="",
        answer="",
        input_ids=np.array(input_ids, "<i4"),
        images=tuple(images),
        output_ids=np.array(output_ids, "<i4"),
        logprobs=np.array([-each / 8 for each in output_ids], "<f4"),
        version_spans=tuple(VersionSpan(num_tokens=count, policy_version=version) for count, version in spans),
        finish_reason="stop",
        num_prompt_tokens=100 + len(input_ids),
        num_cached_tokens=3,
    )


def own(sequence: TokenSequence) -> list[int]:
    """The ids that it trains."""
    return sequence.token_ids[sequence.loss_mask].tolist()


def test_calls_that_extend_one_another_are_one_sequence() -> None:
    """With the spans of both joined, and the last call's counts."""
    first = call([1, 2], [3, 4], images=[A], versions=[(1, 5), (1, 6)])
    second = call([5], [6], continues=10, images=[B], versions=[(1, 6)])
    [sequence] = linearize([(10, first), (11, second)])
    assert sequence.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert sequence.loss_mask.tolist() == [False, False, True, True, False, True]
    assert sequence.logprobs.tolist() == [0, 0, -3 / 8, -4 / 8, 0, -6 / 8]
    assert sequence.version_spans == (
        VersionSpan(num_tokens=1, policy_version=5),
        VersionSpan(num_tokens=2, policy_version=6),
    )
    assert (sequence.images, sequence.num_prompt_tokens, sequence.num_last_turn_tokens) == ((A, B), 101, 1)
    assert [turn.num_output_tokens for turn in turns_of([(10, first), (11, second)])] == [2, 1]


def test_a_turn_says_where_and_when_it_was_played() -> None:
    """As the router recorded it. What the agent does between its calls is nobody's step."""
    played = {"replica_id": "engine-1", "started_at": 1.5, "waited_s": 0.5, "generated_s": 0.25}
    [turn] = turns_of([(10, msgspec.structs.replace(call([1], [2]), **played))])
    assert {name: getattr(turn, name) for name in played} == played
    assert turn.environment_s == 0.0


def test_a_fork_is_a_sequence_that_does_not_train_the_shared_answer_again() -> None:
    """The first branch trains it; for the second it is context."""
    calls = [call([1], [2]), call([3], [4], continues=1), call([5], [6], continues=1)]
    first, second = linearize(list(enumerate(calls, start=1)))
    assert (first.token_ids.tolist(), own(first)) == ([1, 2, 3, 4], [2, 4])
    assert (second.token_ids.tolist(), own(second)) == ([1, 2, 5, 6], [6])
    assert second.version_spans == (VersionSpan(num_tokens=1, policy_version=1),)


def test_a_whole_prompt_that_begins_with_an_earlier_call_joins_it() -> None:
    """Whether the record says so or not: only ids and images count."""
    [sequence] = linearize([(1, call([1], [2])), (2, call([1, 2, 3], [4]))])
    assert own(sequence) == [2, 4]


def test_the_same_ids_with_other_images_do_not_join() -> None:
    """Placeholders are equal; what they stand for is not."""
    calls = [(1, call([1], [2], images=[A])), (2, call([1, 2, 3], [4], images=[B]))]
    assert [own(each) for each in linearize(calls)] == [[2], [4]]


def test_equal_answers_to_one_prompt_are_trained_each() -> None:
    """n = 2 that said the same: both were sampled."""
    calls = [call([1], [2]), call([1], [2]), call([3], [4], continues=2)]
    assert [own(each) for each in linearize(list(enumerate(calls, start=1)))] == [[2], [2, 4]]


def test_a_call_cannot_continue_what_is_not_there() -> None:
    """The stream lost a message."""
    with pytest.raises(ValueError, match="call 7 continues call 3, which is not before it"):
        linearize([(7, call([1], [2], continues=3))])


ids = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@st.composite
def sessions(draw: st.DrawFn) -> list[tuple[int, SessionCall]]:
    """Calls that continue any earlier one, or none, over so few ids that prompts often begin alike."""
    calls: list[tuple[int, SessionCall]] = []
    for number in range(1, 1 + draw(st.integers(1, 8))):
        continues = draw(st.sampled_from([0, *range(1, number)]))
        output = draw(ids)
        versions = [(1, draw(st.integers(1, 3))) for _ in output]
        input_ids = draw(st.lists(st.integers(0, 2), min_size=0 if continues else 1, max_size=3))
        calls.append((number, call(input_ids, output, continues=continues, versions=versions)))
    return calls


@given(sessions())
def test_every_sampled_token_is_trained_once_behind_its_own_prompt(calls: list[tuple[int, SessionCall]]) -> None:
    """Any session: each answer stands in one sequence with mask, logprobs and versions, and its prompt before it."""
    sequences = linearize(calls)
    whole: dict[int, list[int]] = {}
    prompts: dict[int, list[int]] = {}
    for number, each in calls:
        prompts[number] = [*whole.get(each.continues, []), *each.input_ids.tolist()]
        whole[number] = prompts[number] + each.output_ids.tolist()
    expected = sorted(
        (tuple(prompts[number] + each.output_ids.tolist()[:place]), token, float(each.logprobs[place]), version)
        for number, each in calls
        for place, (token, version) in enumerate(
            zip(each.output_ids.tolist(), (span.policy_version for span in each.version_spans), strict=True)
        )
    )
    found = []
    for sequence in sequences:
        versions = itertools.chain.from_iterable(
            [span.policy_version] * span.num_tokens for span in sequence.version_spans
        )
        token_ids = sequence.token_ids.tolist()
        for place in np.flatnonzero(sequence.loss_mask):
            found.append((tuple(token_ids[:place]), token_ids[place], float(sequence.logprobs[place]), next(versions)))
    assert sorted(found) == expected
    assert [each.token_ids.tolist() for each in linearize(calls)] == [each.token_ids.tolist() for each in sequences]
    paths = {tuple(ids) for ids in whole.values()}
    assert all(tuple(sequence.token_ids.tolist()) in paths for sequence in sequences)
