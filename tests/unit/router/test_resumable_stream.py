"""An stream that comes from one replica after another looks as if it came from one."""

import tracemalloc

import pytest

from penstock.errors import InvalidRequestError, PenstockError
from penstock.testing.answers import chunk_of, logprob_of
from penstock.v1 import common_pb2, generate_pb2
from services.router.resumable_stream import ResumableStream, read_query

REQUEST = generate_pb2.GenerateRequest(
    request_id="r",
    session_id="s",
    input_ids=[5, 6],
    images=[common_pb2.Image(data=b"png")],
    sampling=generate_pb2.SamplingParams(max_new_tokens=6, temperature=0.5),
    min_policy_version=3,
)
RAW = REQUEST.SerializeToString()
IDS = [1000, 1001, 1002, 1003, 1004, 1005]
INVALID = generate_pb2.GenerateChunk(output_ids=[1], replica_id="a").SerializeToString()
"""A chunk that has no logprob of its token."""


def whole(versions: list[int], *, first: int = 0, replica_id: str = "a") -> generate_pb2.GenerateResponse:
    """The stream from token `first` on, as one replica gives it that takes what is before for prompt."""
    ids = IDS[first:]
    return generate_pb2.GenerateResponse(
        output_ids=ids,
        logprobs=[logprob_of(token) for token in ids],
        version_spans=[common_pb2.VersionSpan(num_tokens=1, policy_version=version) for version in versions[first:]],
        finish_reason=generate_pb2.FINISH_REASON_LENGTH,
        usage=generate_pb2.Usage(num_prompt_tokens=9 + first, num_cached_tokens=first, num_output_tokens=len(ids)),
        replica_id=replica_id,
    )


def chunks(response: generate_pb2.GenerateResponse, *cuts: int) -> list[bytes]:
    return [
        chunk_of(response, first, end).SerializeToString() for first, end in zip((0, *cuts), (*cuts, 6), strict=True)
    ]


def joined(parts: list[bytes]) -> generate_pb2.GenerateChunk:
    return generate_pb2.GenerateChunk.FromString(b"".join(parts))


def test_reads_what_a_call_wants() -> None:
    """The prompt's blocks only if they are asked for; bytes that are no request are refused."""
    query = read_query(RAW, with_blocks=False)
    assert (query.session_id, query.request_id, query.min_version, query.blocks) == ("s", "r", 3, ())
    sampling = generate_pb2.SamplingParams(max_new_tokens=1)
    long = generate_pb2.GenerateRequest(input_ids=[1] * 130, sampling=sampling).SerializeToString()
    assert len(read_query(long, with_blocks=True).blocks) == 2
    assert read_query(long, with_blocks=False).num_tokens == 131
    with pytest.raises(InvalidRequestError, match="3 bytes are not a GenerateRequest"):
        read_query(b"\xff\xff\xff", with_blocks=False)
    for fields in ({"prompt_logprobs": True}, {"routed_experts_from": 0}):
        asked = generate_pb2.GenerateRequest(sampling=sampling, **fields)
        assert read_query(asked.SerializeToString(), with_blocks=False).reports_prompt
    assert not query.reports_prompt
    paired = generate_pb2.GenerateRequest(sampling=sampling, bootstrap=generate_pb2.Bootstrap(room=1))
    with pytest.raises(InvalidRequestError, match="bootstrap"):
        read_query(paired.SerializeToString(), with_blocks=False)


def test_a_request_is_kept_once() -> None:
    """A call that waits holds the bytes that came and no copy; choices of one prompt share its bytes."""
    images = common_pb2.Image(data=bytes(2**20))
    raw = generate_pb2.GenerateRequest(images=[images]).SerializeToString()
    tracemalloc.start()
    try:
        streams = [ResumableStream(raw, b"", chunk_tokens=64) for _ in range(8)]
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < len(raw) / 10
    assert all(stream.size_bytes == len(raw) for stream in streams)
    assert ResumableStream(raw).make_request(None) is raw


def test_an_unbroken_stream_is_that_of_the_replica() -> None:
    """The attempt is the request with chunks as the router wants them; spans of one version that meet are one."""
    stream = ResumableStream(RAW, chunk_tokens=16)
    attempt = generate_pb2.GenerateRequest.FromString(stream.make_request(None))
    assert attempt.chunk_tokens == 16
    attempt.chunk_tokens = 0
    assert attempt == REQUEST
    for chunk in chunks(whole([3, 3, 3, 3, 4, 4]), 1, 3):
        assert stream.take(chunk) == chunk
    assert stream.end_attempt()
    response = generate_pb2.GenerateResponse.FromString(stream.response())
    assert list(response.output_ids) == IDS
    assert [(span.num_tokens, span.policy_version) for span in response.version_spans] == [(4, 3), (2, 4)]
    assert response.usage == generate_pb2.Usage(num_prompt_tokens=9, num_output_tokens=6)


@pytest.mark.parametrize("num_first", [0, 1, 4])
def test_a_broken_stream_is_as_of_one_replica(num_first: int) -> None:
    """The next attempt goes on from what was delivered; it looks unbroken."""
    stream = ResumableStream(RAW, chunk_tokens=2)
    seen = []
    if num_first:
        seen.append(stream.take(chunk_of(whole([3] * 6), 0, num_first).SerializeToString()))
    assert not stream.end_attempt()
    assert stream.num_tokens == num_first
    attempt = generate_pb2.GenerateRequest.FromString(stream.make_request(None))
    assert list(attempt.input_ids) == [5, 6, *IDS[:num_first]]
    assert attempt.sampling.max_new_tokens == 6 - num_first
    assert attempt.images == REQUEST.images
    assert attempt.request_id == "r#1"
    assert attempt.chunk_tokens == 2
    second = whole([3] * 6, first=num_first, replica_id="b")
    for first, end in ((0, 1), (1, 6 - num_first)):
        seen.append(stream.take(chunk_of(second, first, end).SerializeToString()))
    assert stream.end_attempt()
    response = generate_pb2.GenerateResponse.FromString(stream.response())
    usage = generate_pb2.Usage(num_prompt_tokens=9, num_output_tokens=6)
    expected = whole([3] * 6, replica_id="b")
    del expected.version_spans[:]
    expected.version_spans.add(num_tokens=6, policy_version=3)
    assert response == expected
    streamed = joined(seen)
    assert list(streamed.output_ids) == IDS
    assert streamed.logprobs == response.logprobs
    assert streamed.finish_reason == generate_pb2.FINISH_REASON_LENGTH
    assert streamed.usage == usage
    parts = [generate_pb2.GenerateChunk.FromString(part) for part in seen]
    assert [part.HasField("usage") for part in parts] == [True] + [False] * (len(parts) - 2) + [True]


def test_a_replica_that_breaks_off_twice_costs_two_attempts() -> None:
    """Each attempt goes on from all that was delivered, under a name of its own."""
    stream = ResumableStream(RAW)
    stream.take(chunk_of(whole([3] * 6), 0, 2).SerializeToString())
    assert not stream.end_attempt()
    stream.make_request(None)
    stream.take(chunk_of(whole([4] * 6, first=2), 0, 1).SerializeToString())
    assert not stream.end_attempt()
    attempt = generate_pb2.GenerateRequest.FromString(stream.make_request(None))
    assert (attempt.request_id, list(attempt.input_ids)) == ("r#2", [5, 6, *IDS[:3]])
    stream.take(chunk_of(whole([4] * 6, first=3), 0, 3).SerializeToString())
    assert stream.end_attempt()
    response = generate_pb2.GenerateResponse.FromString(stream.response())
    assert [(span.num_tokens, span.policy_version) for span in response.version_spans] == [(2, 3), (4, 4)]


@pytest.mark.parametrize("num_breaks", [1, 2])
def test_a_form_starts_over_where_nobody_has_seen_it(num_breaks: int) -> None:
    """After each break the whole request is sent again, and the answer is the last attempt's alone."""
    asked = generate_pb2.GenerateRequest.FromString(RAW)
    asked.sampling.constraint.regex = ".*"
    stream = ResumableStream(asked.SerializeToString(), may_restart=True)
    for number in range(1, 1 + num_breaks):
        stream.take(chunk_of(whole([3] * 6), 0, 4).SerializeToString())
        assert not stream.end_attempt()
        assert stream.num_tokens == 0
        stream.require_continuable()
        attempt = generate_pb2.GenerateRequest.FromString(stream.make_request(None))
        asked.request_id = f"r#{number}"
        assert attempt == asked
    for chunk in chunks(whole([4] * 6, replica_id="b"), 3):
        stream.take(chunk)
    assert stream.end_attempt()
    response = generate_pb2.GenerateResponse.FromString(stream.response())
    assert list(response.output_ids) == IDS
    assert [(span.num_tokens, span.policy_version) for span in response.version_spans] == [(6, 4)]
    assert response.usage == generate_pb2.Usage(num_prompt_tokens=9, num_output_tokens=6)


def test_a_break_after_the_last_token_is_none() -> None:
    """The stream is whole, whatever became of the stream."""
    stream = ResumableStream(RAW)
    for chunk in chunks(whole([3] * 6), 3):
        stream.take(chunk)
    assert stream.end_attempt()


@pytest.mark.parametrize("num_valid", [0, 2])
def test_a_stream_whose_caller_has_invalid_tokens_ends(num_valid: int) -> None:
    """Ids without logprobs are nobody's stream: another attempt would give its caller the first tokens again."""
    stream = ResumableStream(RAW)
    if num_valid:
        stream.take(chunk_of(whole([3] * 6), 0, num_valid).SerializeToString())
    stream.take(INVALID)
    with pytest.raises(PenstockError, match="contract"):
        stream.end_attempt()
    with pytest.raises(PenstockError, match=r"contract .* ask again"):
        stream.require_continuable()


@pytest.mark.parametrize(
    ("chunk", "may_restart"),
    [(INVALID, True), (generate_pb2.GenerateChunk(replica_id="a").SerializeToString(), False)],
    ids=["read-whole", "without-tokens"],
)
def test_an_invalid_answer_starts_over_where_nobody_has_its_tokens(chunk: bytes, may_restart: bool) -> None:
    """Because only the whole answer is read, or there were none. The next attempt has an id of its own."""
    stream = ResumableStream(RAW, may_restart=may_restart)
    stream.take(chunk)
    with pytest.raises(PenstockError, match="contract"):
        stream.end_attempt()
    stream.require_continuable()
    attempt = generate_pb2.GenerateRequest.FromString(stream.make_request(None))
    assert (attempt.request_id, list(attempt.input_ids)) == ("r#1", [5, 6])
    for each in chunks(whole([4] * 6, replica_id="b"), 3):
        stream.take(each)
    assert stream.end_attempt()
    assert list(generate_pb2.GenerateResponse.FromString(stream.response()).output_ids) == IDS
