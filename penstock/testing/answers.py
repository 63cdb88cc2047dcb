"""Answers of a simulated engine: functions of the request and the replica, which may be swapped while it runs."""

import dataclasses
from collections.abc import Callable, Sequence

from penstock.v1 import common_pb2, generate_pb2

Answer = Callable[[generate_pb2.GenerateRequest, common_pb2.Replica], generate_pb2.GenerateResponse]

FIRST_ID = 1000
"""The first id of `counting`; prompts' ids are below it."""


def counting(request: generate_pb2.GenerateRequest, replica: common_pb2.Replica) -> generate_pb2.GenerateResponse:
    """Answer ids 1000, 1001, 1002, ..., up to the limit or a stop id; continue a prompt that ends with such an id."""
    first = FIRST_ID
    if request.input_ids and request.input_ids[-1] >= FIRST_ID:
        first = request.input_ids[-1] + 1
    ids = list(range(first, first + request.sampling.max_new_tokens))
    stops = [token for token in ids if token in request.sampling.stop_token_ids]
    if stops:
        ids = ids[: ids.index(stops[0]) + 1]
    return generate_pb2.GenerateResponse(
        output_ids=ids,
        logprobs=[logprob_of(token) for token in ids],
        version_spans=[common_pb2.VersionSpan(num_tokens=len(ids), policy_version=replica.policy_version)],
        finish_reason=generate_pb2.FINISH_REASON_STOP if stops else generate_pb2.FINISH_REASON_LENGTH,
        usage=generate_pb2.Usage(num_prompt_tokens=len(request.input_ids), num_output_tokens=len(ids)),
        replica_id=replica.replica_id,
    )


def logprob_of(token: int) -> float:
    """Return the log-probability of an id of `counting`; each id has a different one."""
    return -(token - FIRST_ID + 1) / 64


@dataclasses.dataclass(frozen=True, slots=True)
class Saying:
    """Answer every prompt with `ids`, the last of which ends the answer.

    A prompt that ends with the first of them is continued. The n-th id has the log-probability -n/64. If no token may
    end the answer, the last one is repeated.
    """

    ids: Sequence[int]

    def __call__(
        self, request: generate_pb2.GenerateRequest, replica: common_pb2.Replica
    ) -> generate_pb2.GenerateResponse:
        """Answer."""
        prompt, ids = list(request.input_ids), list(self.ids)
        done = next((count for count in range(len(ids) - 1, 0, -1) if prompt[-count:] == ids[:count]), 0)
        ends = not request.sampling.ignore_end
        if not ends:
            ids += ids[-1:] * request.sampling.max_new_tokens
        left = ids[done:][: request.sampling.max_new_tokens]
        is_complete = ends and done + len(left) == len(ids)
        return generate_pb2.GenerateResponse(
            output_ids=left,
            logprobs=[-(done + index + 1) / 64 for index in range(len(left))],
            version_spans=[common_pb2.VersionSpan(num_tokens=len(left), policy_version=replica.policy_version)],
            finish_reason=generate_pb2.FINISH_REASON_STOP if is_complete else generate_pb2.FINISH_REASON_LENGTH,
            usage=generate_pb2.Usage(num_prompt_tokens=len(prompt), num_cached_tokens=1, num_output_tokens=len(left)),
            replica_id=replica.replica_id,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class SpanningAPush:
    """Answer every prompt with `ids`, and stop: the first has the replica's version, the others the next one."""

    ids: Sequence[int]

    def __call__(
        self, request: generate_pb2.GenerateRequest, replica: common_pb2.Replica
    ) -> generate_pb2.GenerateResponse:
        """Answer."""
        num_tokens, version = len(self.ids), replica.policy_version
        return generate_pb2.GenerateResponse(
            output_ids=self.ids,
            logprobs=[-0.5] * num_tokens,
            version_spans=[
                common_pb2.VersionSpan(num_tokens=1, policy_version=version),
                common_pb2.VersionSpan(num_tokens=num_tokens - 1, policy_version=version + 1),
            ],
            finish_reason=generate_pb2.FINISH_REASON_STOP,
            usage=generate_pb2.Usage(num_prompt_tokens=99, num_cached_tokens=5, num_output_tokens=num_tokens),
            replica_id=replica.replica_id,
        )


def scored(
    response: generate_pb2.GenerateResponse, request: generate_pb2.GenerateRequest
) -> generate_pb2.GenerateResponse:
    """Return the answer with the likeliest ids and prompt logprobs that the request asks for.

    The n-th prompt id has the log-probability -n/32. Each id is the likeliest at its place; the next likeliest are the
    ids that follow it, each 1 less.
    """
    num_top = request.num_top_logprobs
    if num_top:
        response.top_logprobs.extend(
            _top(token, logprob, num_top) for token, logprob in zip(response.output_ids, response.logprobs, strict=True)
        )
    if request.prompt_logprobs:
        logprobs = [-index / 32 for index in range(1, len(request.input_ids))]
        top = [_top(*each, num_top) for each in zip(request.input_ids[1:], logprobs, strict=True)] if num_top else []
        response.prompt_logprobs.CopyFrom(generate_pb2.PromptLogprobs(logprobs=logprobs, top_logprobs=top))
    return response


def _top(token: int, logprob: float, count: int) -> generate_pb2.TopLogprobs:
    return generate_pb2.TopLogprobs(
        ids=range(token, token + count), logprobs=[logprob - index for index in range(count)]
    )


def first_token(response: generate_pb2.GenerateResponse) -> generate_pb2.GenerateResponse:
    """Return the part of an answer that a prefill engine returns."""
    version = response.version_spans[0].policy_version
    return generate_pb2.GenerateResponse(
        output_ids=response.output_ids[:1],
        logprobs=response.logprobs[:1],
        version_spans=[common_pb2.VersionSpan(num_tokens=1, policy_version=version)],
        finish_reason=generate_pb2.FINISH_REASON_LENGTH,
        replica_id=response.replica_id,
    )


def chunk_of(response: generate_pb2.GenerateResponse, first: int, end: int) -> generate_pb2.GenerateChunk:
    """Return tokens `first` up to `end` of an answer, as a gRPC stream carries them."""
    chunk = generate_pb2.GenerateChunk(
        output_ids=response.output_ids[first:end],
        logprobs=response.logprobs[first:end],
        replica_id=response.replica_id,
    )
    chunk.top_logprobs.extend(response.top_logprobs[first:end])
    if first == 0 and response.HasField("prompt_logprobs"):
        chunk.prompt_logprobs.CopyFrom(response.prompt_logprobs)
    start = 0
    for span in response.version_spans:
        num_tokens = min(end, start + span.num_tokens) - max(first, start)
        start += span.num_tokens
        if num_tokens > 0:
            chunk.version_spans.add(num_tokens=num_tokens, policy_version=span.policy_version)
    if end == len(response.output_ids):
        chunk.finish_reason = response.finish_reason
    if first == 0 or end == len(response.output_ids):
        chunk.usage.CopyFrom(response.usage)
        chunk.usage.num_output_tokens = end
    return chunk
