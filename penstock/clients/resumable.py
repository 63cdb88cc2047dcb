"""One turn over several replicas: what was delivered so far, and the request that plays the rest elsewhere.

The policy needs nothing but its tokens to go on, so a turn whose replica dies is not played again: another replica
takes the delivered tokens as part of the prompt. Invariant: in whatever legs and chunks the tokens come, the response
has the form of an unbroken one.
"""

from penstock.errors import NotReadyError, PenstockError
from penstock.v1 import common_pb2, generate_pb2


class ResumableTurn:
    """One turn. Play `remaining()` and `add` its chunks; repeat until `is_finished`; then take the `response()`."""

    def __init__(self, request: generate_pb2.GenerateRequest) -> None:
        """Nothing of `request` was played yet; it is not changed."""
        self._request = request
        self._response = generate_pb2.GenerateResponse()
        self._num_legs = 0
        self._in_first_leg = True

    @property
    def num_tokens(self) -> int:
        """Tokens delivered so far."""
        return len(self._response.output_ids)

    @property
    def is_finished(self) -> bool:
        """Whether the last token was delivered."""
        return self._response.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED

    def remaining(self) -> generate_pb2.GenerateRequest:
        """A new leg: the request that plays what is left. The first is the turn's own, the n-th after it is named `#n`.

        Raises:
            NotReadyError: nothing is left.
        """
        if self.is_finished:
            raise NotReadyError(f"request {self._request.request_id!r} is finished; take its response")
        leg = generate_pb2.GenerateRequest()
        leg.CopyFrom(self._request)
        if self._num_legs > 0:
            leg.request_id = f"{leg.request_id}#{self._num_legs}"
        leg.input_ids.extend(self._response.output_ids)
        leg.sampling.max_new_tokens -= self.num_tokens
        self._num_legs += 1
        self._in_first_leg = self.num_tokens == 0
        return leg

    def add(self, chunk: generate_pb2.GenerateChunk) -> None:
        """Take what a leg delivered.

        Raises:
            PenstockError: the chunk breaks the contract of GenerateStream; nothing of it was taken.
        """
        self._check(chunk)
        response = self._response
        response.output_ids.extend(chunk.output_ids)
        response.logprobs.extend(chunk.logprobs)
        for span in chunk.version_spans:
            self._add_span(span)
        response.finish_reason = chunk.finish_reason
        response.replica_id = chunk.replica_id
        if self._in_first_leg and chunk.HasField("usage"):
            response.usage.CopyFrom(chunk.usage)
        response.usage.num_output_tokens = self.num_tokens

    def relay(self, chunk: generate_pb2.GenerateChunk) -> None:
        """Take what a leg delivered, and make `chunk` what the turn's caller should see in its place.

        A later leg counts what was delivered before as prompt; the caller is told the usage of the turn.

        Raises:
            PenstockError: as `add` does.
        """
        is_first = self.num_tokens == 0
        self.add(chunk)
        if self.is_finished:
            chunk.usage.CopyFrom(self._response.usage)
        elif not is_first:
            chunk.ClearField("usage")

    def cut(self, reason: generate_pb2.FinishReason.ValueType) -> None:
        """End the turn for `reason` with the tokens delivered so far.

        Raises:
            NotReadyError: no token was delivered, or the turn has ended.
        """
        if self.is_finished or self.num_tokens == 0:
            raise NotReadyError(f"request {self._request.request_id!r} cannot be cut: it has ended, or has no token")
        self._response.finish_reason = reason

    def response(self) -> generate_pb2.GenerateResponse:
        """The whole turn. Its usage counts the prompt of the first leg; its replica is the one that ended it.

        Raises:
            NotReadyError: tokens are missing.
        """
        if not self.is_finished:
            raise NotReadyError(
                f"request {self._request.request_id!r} has {self.num_tokens} tokens and no end yet; play remaining()"
            )
        return self._response

    def _add_span(self, span: common_pb2.VersionSpan) -> None:
        spans = self._response.version_spans
        if spans and spans[-1].policy_version == span.policy_version:
            spans[-1].num_tokens += span.num_tokens
        else:
            spans.append(span)

    def _check(self, chunk: generate_pb2.GenerateChunk) -> None:
        num_ids, num_logprobs = len(chunk.output_ids), len(chunk.logprobs)
        num_spanned = sum(span.num_tokens for span in chunk.version_spans)
        left = self._request.sampling.max_new_tokens - self.num_tokens
        is_last = chunk.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED
        if self.is_finished:
            fault = "it comes after the last one"
        elif not num_ids or not num_ids == num_logprobs == num_spanned:
            fault = f"it has {num_ids} ids, {num_logprobs} logprobs and spans of {num_spanned} tokens"
        elif num_ids > left:
            fault = f"it has {num_ids} tokens where {left} were left"
        elif num_ids == left and not is_last:
            fault = "it has the last token that was asked for, but no finish reason"
        else:
            return
        raise PenstockError(
            f"replica {chunk.replica_id!r} broke the contract of GenerateStream: a chunk of request "
            f"{self._request.request_id!r} cannot be, {fault}"
        )
