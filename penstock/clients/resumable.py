"""One turn over several replicas: the tokens delivered so far, and the request for the rest.

To continue, the policy needs only the tokens so far. So when a replica dies, the turn does not start over: another
replica gets the delivered tokens as part of the prompt. The exception is an answer with a grammar. The grammar would
begin anew, so such a turn starts over, and only while its caller has received nothing of it. Invariant: the response
looks unbroken, over any number of attempts and chunks.
"""

from penstock.errors import NotReadyError, PenstockError, UnavailableError
from penstock.v1 import common_pb2, generate_pb2


class ResumableTurn:
    """One turn (`penstock.clients.turn.TurnProgress`). Send `remaining()` and `add` its chunks; repeat until
    `is_finished`; then read the `response()`."""

    def __init__(self, request: generate_pb2.GenerateRequest, *, may_restart: bool = False) -> None:
        """Start with nothing delivered; `request` is not modified.

        Args:
            request: The turn.
            may_restart: Whether its caller gets the whole turn only, so that one that cannot be continued starts over.
        """
        self._request = request
        self._may_restart = may_restart
        self._response = generate_pb2.GenerateResponse()
        self._num_attempts = 0
        self._is_first_attempt = True

    @property
    def num_tokens(self) -> int:
        """Tokens delivered so far."""
        return len(self._response.output_ids)

    @property
    def is_finished(self) -> bool:
        """Whether the last token was delivered."""
        return self._response.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED

    def remaining(self) -> generate_pb2.GenerateRequest:
        """Begin an attempt: return the request for the rest. The first one is the turn's own; the n-th after it has
        `#n` appended to its id.

        Raises:
            NotReadyError: nothing is left.
        """
        if self.is_finished:
            raise NotReadyError(f"request {self._request.request_id!r} is finished; read its response")
        attempt = generate_pb2.GenerateRequest()
        attempt.CopyFrom(self._request)
        if self._num_attempts > 0:
            attempt.request_id = f"{attempt.request_id}#{self._num_attempts}"
        attempt.input_ids.extend(self._response.output_ids)
        attempt.sampling.max_new_tokens -= self.num_tokens
        attempt.prompt_logprobs = attempt.prompt_logprobs and self.num_tokens == 0  # they came with the first token
        self._num_attempts += 1
        self._is_first_attempt = self.num_tokens == 0
        return attempt

    def make_request(self, bootstrap: generate_pb2.Bootstrap | None) -> generate_pb2.GenerateRequest:
        """Return `remaining()` with the bootstrap of a PD pair."""
        attempt = self.remaining()
        if bootstrap is not None:
            attempt.bootstrap.CopyFrom(bootstrap)
        return attempt

    def require_continuable(self) -> None:
        """Check that another replica can continue from the tokens delivered so far.

        Raises:
            UnavailableError: it cannot, because its grammar would start over.
        """
        if not self._is_continuable:
            raise UnavailableError(
                f"request {self._request.request_id!r} lost its replica after {self.num_tokens} tokens; an answer with "
                "sampling.constraint cannot be continued by another, so ask again"
            )

    def is_last(self, chunk: generate_pb2.GenerateChunk) -> bool:
        """Return whether this is the last chunk."""
        return chunk.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED

    def add(self, chunk: generate_pb2.GenerateChunk) -> None:
        """Add the tokens of an attempt's chunk.

        Raises:
            PenstockError: the chunk breaks the contract of GenerateStream; nothing was added.
        """
        self._check(chunk)
        response = self._response
        response.output_ids.extend(chunk.output_ids)
        response.logprobs.extend(chunk.logprobs)
        response.top_logprobs.extend(chunk.top_logprobs)
        if chunk.HasField("prompt_logprobs"):
            response.prompt_logprobs.CopyFrom(chunk.prompt_logprobs)
        if chunk.HasField("routed_experts"):  # in the last chunk, for the whole turn
            response.routed_experts.CopyFrom(chunk.routed_experts)
        for span in chunk.version_spans:
            self._add_span(span)
        response.finish_reason = chunk.finish_reason
        response.replica_id = chunk.replica_id
        if self._is_first_attempt and chunk.HasField("usage"):
            response.usage.CopyFrom(chunk.usage)
        response.usage.num_output_tokens = self.num_tokens

    def take(self, chunk: generate_pb2.GenerateChunk) -> generate_pb2.GenerateChunk:
        """`add` the chunk, and return it as the turn's caller should see it.

        A later attempt counts the tokens delivered before it as prompt; the caller sees the usage of the whole turn.

        Raises:
            PenstockError: as in `add`.
        """
        is_first = self.num_tokens == 0
        self.add(chunk)
        if self.is_finished:
            chunk.usage.CopyFrom(self._response.usage)
        elif not is_first:
            chunk.ClearField("usage")
        return chunk

    def end_attempt(self) -> bool:
        """End the attempt; return whether the turn is complete. One that must start over drops its tokens."""
        if self._may_restart and not self.is_finished and not self._is_continuable:
            self._response = generate_pb2.GenerateResponse()
        return self.is_finished

    def cut(self, reason: generate_pb2.FinishReason.ValueType) -> None:
        """End the turn for `reason` with the tokens delivered so far.

        Raises:
            NotReadyError: no token was delivered, or the turn has ended.
        """
        if self.is_finished or self.num_tokens == 0:
            raise NotReadyError(f"request {self._request.request_id!r} cannot be cut: it has ended, or has no token")
        self._response.finish_reason = reason

    def response(self) -> generate_pb2.GenerateResponse:
        """Return the complete turn. Its usage counts the first attempt's prompt; its replica is the last attempt's.

        Raises:
            NotReadyError: tokens are missing.
        """
        if not self.is_finished:
            raise NotReadyError(
                f"request {self._request.request_id!r} has {self.num_tokens} tokens and no end yet; send remaining()"
            )
        return self._response

    @property
    def _is_continuable(self) -> bool:
        return self.num_tokens == 0 or not self._request.sampling.HasField("constraint")

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
        if self.is_finished:
            fault = "it follows the last one"
        elif not num_ids or not num_ids == num_logprobs == num_spanned:
            fault = f"it has {num_ids} ids, {num_logprobs} logprobs and spans of {num_spanned} tokens"
        elif len(chunk.top_logprobs) not in (0, num_ids):
            fault = f"it has the likeliest ids at {len(chunk.top_logprobs)} of {num_ids} tokens"
        elif num_ids > left:
            fault = f"it has {num_ids} tokens where {left} were left"
        elif num_ids == left and not self.is_last(chunk):
            fault = "it has the last token that was asked for, but no finish reason"
        else:
            return
        raise PenstockError(
            f"replica {chunk.replica_id!r} broke the contract of GenerateStream: a chunk of request "
            f"{self._request.request_id!r} is invalid, {fault}"
        )
