"""Answers in OpenAI's formats, whole and streamed, with what Penstock adds to them."""

import abc
import time
import uuid
from collections.abc import Sequence
from typing import Any

from penstock.model.argument_values import arguments_json
from penstock.model.detokenize import TokenTexts
from penstock.records import ToolCall, VersionSpan
from services.router.frontends.openai.choice import Choice, ChoiceDelta, Token
from services.router.frontends.openai.parsed_request import ParsedRequest

VERSION_HEADER = "x-penstock-policy-version"
IGNORED_HEADER = "x-penstock-ignored"
"""Names parameters that were accepted though they have no effect."""


class ResponseFormat(abc.ABC):
    """One answer; subclasses format its choices."""

    whole_object: str
    chunk_object: str

    def __init__(self, request: ParsedRequest, choices: Sequence[Choice], texts: TokenTexts, *, model: str) -> None:
        """Format `choices` as they are when a method is called."""
        self._request = request
        self._choices = choices
        self._texts = texts
        self._model = model
        self._created = int(time.time())

    def whole(self) -> dict[str, Any]:
        """The answer, when all choices have ended."""
        choices = [self._entry(index, self._whole_choice(index)) for index in range(len(self._choices))]
        return {**self._frame(self.whole_object, choices), "usage": self._usage(), "penstock": self._extra()}

    @abc.abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The event before a choice's first delta, if there is one."""

    def delta(self, index: int, delta: ChoiceDelta) -> dict[str, Any] | None:
        """The event of a delta; None if there is nothing to send yet."""
        request, has_more = self._request, bool(delta.content or delta.calls)
        if not has_more and not (delta.tokens and (request.shows_token_ids or request.shows_logprobs)):
            return None
        return self._frame(self.chunk_object, [self._delta_choice(index, delta)])

    def closing(self, index: int, *, is_last: bool) -> dict[str, Any]:
        """The event of a choice's end; the last one carries what Penstock adds."""
        choice = self._entry(index, {**self._empty(), "finish_reason": self._choices[index].finish_reason})
        frame = self._frame(self.chunk_object, [choice])
        return {**frame, "penstock": self._extra()} if is_last else frame

    def usage(self) -> dict[str, Any]:
        """The last event of a stream with usage."""
        return {**self._frame(self.chunk_object, []), "usage": self._usage()}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer; a stream's are those of its beginning."""
        headers = {VERSION_HEADER: str(self._version), "x-request-id": self._request.request_id}
        if self._request.ignored:
            headers[IGNORED_HEADER] = ", ".join(self._request.ignored)
        return headers

    @abc.abstractmethod
    def _whole_choice(self, index: int) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _delta_choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _empty(self) -> dict[str, Any]: ...

    @property
    def _version(self) -> int:
        return max(choice.newest_version for choice in self._choices)

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._request.request_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": f"policy-{self._version}",
            "choices": choices,
        }

    def _entry(self, index: int, fields: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "logprobs": None, "finish_reason": None, **fields}

    def _token_fields(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Ids and logprobs for training, if requested."""
        if not self._request.shows_token_ids:
            return {}
        return {
            "token_ids": [token.number for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
        }

    def _prompt_fields(self, index: int) -> dict[str, Any]:
        if not self._request.shows_token_ids:
            return {}
        return {"prompt_token_ids": list(self._request.prompt_of(index).input_ids)}

    def _usage(self) -> dict[str, Any]:
        firsts = self._choices[:: self._request.num_choices]  # a prompt counts once, however many its choices
        num_prompt = sum(choice.num_prompt_tokens for choice in firsts)
        num_output = sum(len(choice.tokens) for choice in self._choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in firsts)},
        }

    def _extra(self) -> dict[str, Any]:
        return {
            "request_id": self._request.request_id,
            "session_id": self._request.session_id,
            "is_recorded": self._request.is_recorded,
            "policy_version_spans": [spans_json(choice.version_spans) for choice in self._choices],
        }


class ChatFormat(ResponseFormat):
    """Answers of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self) -> dict[str, Any]:
        """The answer, when all choices have ended; with the prompt's ids once, if requested."""
        return {**super().whole(), **self._prompt_fields(0)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role."""
        choice = self._entry(index, {"delta": {"role": "assistant", "content": ""}})
        return {**self._frame(self.chunk_object, [choice]), **self._prompt_fields(index)}

    def _whole_choice(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.content if choice.content or not choice.calls else None,
            "refusal": None,
        }
        if choice.calls:
            message["tool_calls"] = [_call_json(call) for call in choice.calls]
        return {
            "message": message,
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
            **self._token_fields(choice.tokens),
        }

    def _delta_choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        message: dict[str, Any] = {"content": delta.content} if delta.content or not delta.calls else {}
        if delta.calls:
            first = len(self._choices[index].calls) - len(delta.calls)
            message["tool_calls"] = [
                {"index": first + index_in_delta, **_call_json(call)} for index_in_delta, call in enumerate(delta.calls)
            ]
        fields = {"delta": message, "logprobs": self._logprobs(delta.tokens), **self._token_fields(delta.tokens)}
        return self._entry(index, fields)

    def _empty(self) -> dict[str, Any]:
        return {"delta": {}}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._request.shows_logprobs:
            return None
        content = [
            {
                "token": self._texts.name_of(token.number),
                "logprob": token.logprob,
                "bytes": list(self._texts.bytes_of(token.number)),
                "top_logprobs": [],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class CompletionFormat(ResponseFormat):
    """Answers of /v1/completions."""

    whole_object = chunk_object = "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        """The prompt's ids, if requested."""
        fields = self._prompt_fields(index)
        return self._frame(self.chunk_object, [self._entry(index, {"text": "", **fields})]) if fields else None

    def _whole_choice(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        return {
            "text": choice.content,
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
            **self._prompt_fields(index),
            **self._token_fields(choice.tokens),
        }

    def _delta_choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        fields = {"text": delta.content, "logprobs": self._logprobs(delta.tokens)}
        return self._entry(index, {**fields, **self._token_fields(delta.tokens)})

    def _empty(self) -> dict[str, Any]:
        return {"text": ""}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._request.shows_logprobs:
            return None
        return {
            "tokens": [self._texts.name_of(token.number) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self._texts.name_of(token.number): token.logprob} for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def spans_json(spans: Sequence[VersionSpan]) -> list[dict[str, int]]:
    """Spans as JSON."""
    return [{"num_tokens": span.num_tokens, "policy_version": span.policy_version} for span in spans]


def _call_json(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments_json(call.arguments)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
