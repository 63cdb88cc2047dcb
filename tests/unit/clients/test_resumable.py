"""A turn in attempts and chunks is the same turn."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.clients.resumable import ResumableTurn
from penstock.errors import NotReadyError, PenstockError, UnavailableError
from penstock.testing.answers import chunk_of, scored
from penstock.v1 import common_pb2, generate_pb2

PROMPT = [5, 6, 7]


def request(max_new_tokens: int) -> generate_pb2.GenerateRequest:
    """A turn with everything set."""
    return generate_pb2.GenerateRequest(
        request_id="r",
        session_id="s",
        input_ids=PROMPT,
        images=[common_pb2.Image(data=b"png")],
        sampling=generate_pb2.SamplingParams(
            temperature=0.5, top_p=0.9, top_k=3, max_new_tokens=max_new_tokens, stop_token_ids=[9]
        ),
        min_policy_version=2,
        chunk_tokens=4,
    )


def answer(versions: list[int], *, stopped: bool = False, num_prompt_tokens: int = 8) -> generate_pb2.GenerateResponse:
    """An unbroken answer whose tokens were made by `versions`, one after the other."""
    response = generate_pb2.GenerateResponse(
        output_ids=range(100, 100 + len(versions)),
        logprobs=[-index / 4 for index in range(len(versions))],
        finish_reason=generate_pb2.FINISH_REASON_STOP if stopped else generate_pb2.FINISH_REASON_LENGTH,
        usage=generate_pb2.Usage(
            num_prompt_tokens=num_prompt_tokens, num_cached_tokens=3, num_output_tokens=len(versions)
        ),
        replica_id="last",
    )
    for version in versions:
        if response.version_spans and response.version_spans[-1].policy_version == version:
            response.version_spans[-1].num_tokens += 1
        else:
            response.version_spans.add(num_tokens=1, policy_version=version)
    return response


def rest_of(response: generate_pb2.GenerateResponse, first: int, *, attempt: int) -> generate_pb2.GenerateResponse:
    """The same answer from token `first` on, as another replica gives it to a prompt that is as much longer."""
    rest = generate_pb2.GenerateResponse(
        output_ids=response.output_ids[first:],
        logprobs=response.logprobs[first:],
        version_spans=chunk_of(response, first, len(response.output_ids)).version_spans,
        finish_reason=response.finish_reason,
        usage=response.usage,
        replica_id=response.replica_id,
    )
    if attempt > 0:
        rest.usage.num_prompt_tokens += first
        rest.usage.num_cached_tokens += 2 * attempt
    return rest


VERSIONS = st.lists(st.integers(min_value=2, max_value=4), min_size=1, max_size=30)


ATTEMPTS = st.lists(st.lists(st.integers(min_value=1, max_value=4), max_size=4), max_size=5)
"""The sizes of the chunks of each attempt that breaks off; an empty one delivered nothing."""


@given(versions=VERSIONS, attempts=ATTEMPTS, stopped=st.booleans(), spare=st.integers(min_value=0, max_value=5))
def test_any_cutting_gives_the_unbroken_response(
    versions: list[int], attempts: list[list[int]], stopped: bool, spare: int
) -> None:
    """Whatever the attempts and chunks: ids, logprobs, spans and usage are those of one stream in one chunk."""
    unbroken, turn = answer(versions, stopped=stopped), request(len(versions) + spare)
    sent = turn.SerializeToString()
    continuation = ResumableTurn(turn)
    for number, sizes in enumerate([*attempts, [len(versions)]]):
        first = continuation.num_tokens
        attempt = continuation.remaining()
        assert attempt.request_id == ("r" if number == 0 else f"r#{number}")
        assert list(attempt.input_ids) == [*PROMPT, *unbroken.output_ids[:first]]
        assert attempt.sampling.max_new_tokens + first == turn.sampling.max_new_tokens
        rest = rest_of(unbroken, first, attempt=first)
        for start, end in pairwise(accumulate(sizes, initial=0)):
            if start < len(rest.output_ids):
                continuation.add(chunk_of(rest, start, min(end, len(rest.output_ids))))
        if continuation.is_finished:
            break
    assert continuation.response() == unbroken
    assert turn.SerializeToString() == sent


def test_an_attempt_is_the_turn_itself_but_for_what_was_delivered() -> None:
    """Images, sampling, session and version bound are kept; a attempt that delivered nothing changes the name only."""
    continuation = ResumableTurn(request(6))
    assert continuation.remaining() == request(6)
    again = request(6)
    again.request_id = "r#1"
    assert continuation.remaining() == again
    continuation.add(chunk_of(answer([2, 2, 3, 3, 3, 3]), 0, 4))
    expected = request(2)
    expected.request_id = "r#2"
    expected.input_ids.extend([100, 101, 102, 103])
    assert continuation.remaining() == expected


def test_usage_counts_the_prompt_of_the_attempt_that_began_it() -> None:
    """Not the longer ones of later attempts, nor their caches; and a first attempt without tokens does not count."""
    whole = answer([2] * 4)
    continuation = ResumableTurn(request(4))
    continuation.remaining()
    continuation.remaining()
    continuation.add(chunk_of(whole, 0, 1))
    continuation.remaining()
    continuation.add(chunk_of(rest_of(whole, 1, attempt=1), 0, 3))
    assert continuation.response().usage == generate_pb2.Usage(
        num_prompt_tokens=8, num_cached_tokens=3, num_output_tokens=4
    )


def test_what_is_not_there_is_not_given() -> None:
    """No response before the end, no attempt after it."""
    continuation = ResumableTurn(request(2))
    with pytest.raises(NotReadyError, match="'r' has 0 tokens and no end yet"):
        continuation.response()
    continuation.remaining()
    continuation.add(chunk_of(answer([2], stopped=True), 0, 1))
    with pytest.raises(NotReadyError, match="'r' is finished"):
        continuation.remaining()


def test_experts_are_of_the_attempt_that_ended_the_turn() -> None:
    """It has computed all tokens, those of earlier attempts as its prompt; so it is asked from the same one on."""
    asked = request(4)
    asked.routed_experts_from = 3
    whole = answer([2] * 4)
    continuation = ResumableTurn(asked)
    continuation.remaining()
    continuation.add(chunk_of(whole, 0, 2))
    assert continuation.remaining().routed_experts_from == 3
    last = chunk_of(rest_of(whole, 2, attempt=1), 0, 2)
    last.routed_experts.first_token = 3
    last.routed_experts.expert_ids = b"all"
    continuation.add(last)
    assert continuation.response().routed_experts == last.routed_experts


WHOLE = answer([2, 2, 3])


def _changed(chunk: generate_pb2.GenerateChunk, **fields: object) -> generate_pb2.GenerateChunk:
    for name, value in fields.items():
        chunk.ClearField(name)  # type: ignore[arg-type]
        if isinstance(value, list):
            getattr(chunk, name).extend(value)
        else:
            setattr(chunk, name, value)
    return chunk


@pytest.mark.parametrize(
    ("chunk", "fault"),
    [
        (generate_pb2.GenerateChunk(), "0 ids"),
        (_changed(chunk_of(WHOLE, 0, 2), logprobs=[-1.0]), "2 ids, 1 logprobs and spans of 2 tokens"),
        (_changed(chunk_of(WHOLE, 0, 2), version_spans=[]), "spans of 0 tokens"),
        (chunk_of(answer([2] * 4), 0, 4), "4 tokens where 3 were left"),
        (_changed(chunk_of(WHOLE, 0, 3), finish_reason=0), "no finish reason"),
    ],
)
def test_a_chunk_that_breaks_the_contract_is_refused_whole(chunk: generate_pb2.GenerateChunk, fault: str) -> None:
    """More tokens than were asked for, parts that disagree, an end without a reason: the turn can go on elsewhere."""
    chunk.replica_id = "e1"
    continuation = ResumableTurn(request(3))
    continuation.remaining()
    with pytest.raises(PenstockError, match=f"replica 'e1' broke the contract .* request 'r' .*{fault}"):
        continuation.add(chunk)
    assert continuation.num_tokens == 0
    continuation.add(chunk_of(WHOLE, 0, 3))
    with pytest.raises(PenstockError, match="it follows the last one"):
        continuation.add(chunk_of(WHOLE, 0, 1))
    assert continuation.response() == WHOLE


def scored_request() -> generate_pb2.GenerateRequest:
    """A turn that wants to know everything."""
    wanted = request(4)
    wanted.num_top_logprobs, wanted.prompt_logprobs = 2, True
    return wanted


def test_a_prompt_is_scored_once() -> None:
    """The attempt after the first token does not ask again, and the response has what the first attempt said."""
    wanted = scored_request()
    turn, whole = ResumableTurn(wanted), scored(answer([3] * 4), wanted)
    assert turn.remaining().prompt_logprobs
    turn.add(chunk_of(whole, 0, 1))
    again = turn.remaining()
    assert not again.prompt_logprobs
    assert again.num_top_logprobs == 2
    turn.add(chunk_of(whole, 1, 4))
    assert turn.response().prompt_logprobs == whole.prompt_logprobs
    assert turn.response().top_logprobs == whole.top_logprobs


def test_likeliest_ids_for_some_tokens_only_are_a_breach() -> None:
    """They are for all of a chunk's tokens, or for none."""
    wanted = scored_request()
    turn, chunk = ResumableTurn(wanted), chunk_of(scored(answer([3] * 4), wanted), 0, 4)
    del chunk.top_logprobs[0]
    with pytest.raises(PenstockError, match="likeliest ids at 3 of 4 tokens"):
        turn.add(chunk)


def test_a_constrained_turn_is_continued_only_before_its_first_token() -> None:
    """The grammar of another replica would begin anew."""
    wanted = request(4)
    wanted.sampling.constraint.json_schema = "{}"
    turn = ResumableTurn(wanted)
    turn.make_request(None)
    turn.require_continuable()
    turn.make_request(None)
    turn.add(chunk_of(answer([3] * 4), 0, 1))
    assert not turn.end_attempt()
    with pytest.raises(UnavailableError, match="after 1 tokens; an answer with sampling"):
        turn.require_continuable()


def test_a_constrained_turn_that_nobody_has_seen_starts_over() -> None:
    """What was delivered is dropped: the next attempt asks for everything again, and usage and spans are its own."""
    wanted = scored_request()
    wanted.sampling.constraint.json_schema = "{}"
    turn, whole = ResumableTurn(wanted, may_restart=True), scored(answer([4] * 4), wanted)
    turn.make_request(None)
    turn.add(chunk_of(scored(answer([3] * 4), wanted), 0, 3))
    assert not turn.end_attempt()
    assert turn.num_tokens == 0
    turn.require_continuable()
    again = turn.make_request(None)
    assert again.request_id == "r#1"
    again.request_id = "r"
    assert again == wanted
    turn.add(chunk_of(whole, 0, 4))
    assert turn.end_attempt()
    assert turn.response() == whole


def test_a_turn_without_a_constraint_never_starts_over() -> None:
    """Another replica goes on from its tokens."""
    turn = ResumableTurn(request(4), may_restart=True)
    turn.make_request(None)
    turn.add(chunk_of(answer([3] * 4), 0, 3))
    assert not turn.end_attempt()
    assert turn.num_tokens == 3
