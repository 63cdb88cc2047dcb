"""Formats answers as OpenAI does, whole and streamed, with Penstock's additions."""

import abc
import time
import uuid
from collections.abc import Sequence
from typing import Any

from penstock.model.chat.argument_values import arguments_json
from penstock.model.detokenize import IncrementalDetokenizer, TokenTexts
from penstock.records import ToolCall, VersionSpan
from services.router.frontends.openai.choice import Choice, ChoiceDelta, Token
from services.router.frontends.openai.logprobs import LogprobsFormat
from services.router.frontends.openai.parsed_request import ParsedRequest

VERSION_HEADER = "x-penstock-policy-version"
IGNORED_HEADER = "x-penstock-ignored"
"""Header that names parameters that were accepted though they have no effect."""


class ResponseFormat(abc.ABC):
    """One answer; subclasses format its choices."""

    whole_object: str
    chunk_object: str

    def __init__(self, request: ParsedRequest, choices: Sequence[Choice], texts: TokenTexts, *, model: str) -> None:
        """Format `choices`. They may be ahead of what is sent, so counts and version are those of the deltas that
        `take` got."""
        self._request = request
        self._choices = choices
        self._texts = texts
        self._logprobs = LogprobsFormat(texts, names_ids=request.names_ids, num_top=request.num_top_logprobs)
        self._model = model
        self._created = int(time.time())
        self._prompt_texts: dict[int, str] = {}
        self._num_tokens = 0
        self._version = 0
        """The newest policy version among the tokens so far."""

    def take(self, delta: ChoiceDelta) -> None:
        """Count a delta, before it is formatted."""
        self._num_tokens += len(delta.tokens)
        self._version = max(self._version, delta.newest_version)

    def whole(self) -> dict[str, Any]:
        """Return the answer, when all choices have ended."""
        choices = [self._entry(index, self._whole_choice(index)) for index in range(len(self._choices))]
        return {**self._frame(self.whole_object, choices), "usage": self._usage(), "penstock": self._extra()}

    @abc.abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the event before a choice's first delta; None if there is none."""

    def delta(self, index: int, delta: ChoiceDelta) -> dict[str, Any] | None:
        """Return the event of a delta; None if there is nothing to send yet."""
        request, has_more = self._request, bool(delta.content or delta.reasoning or delta.calls)
        if not has_more and not (delta.tokens and (request.shows_token_ids or request.shows_logprobs)):
            return None
        return self._frame(self.chunk_object, [self._delta_choice(index, delta)])

    def closing(self, index: int, *, is_last: bool) -> dict[str, Any]:
        """Return the event of a choice's end; the last one carries Penstock's additions."""
        choice = self._entry(index, {**self._empty(), **self._ending(index)})
        frame = self._frame(self.chunk_object, [choice])
        return {**frame, "penstock": self._extra()} if is_last else frame

    def usage(self) -> dict[str, Any]:
        """Return the last event of a stream with usage."""
        return {**self._frame(self.chunk_object, []), "usage": self._usage()}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer; for a stream, those of its beginning."""
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

    def _ending(self, index: int) -> dict[str, Any]:
        """Return how the choice ended: in OpenAI's words, in SGLang's, and in vLLM's, which do not count the model's
        own stop tokens."""
        choice = self._choices[index]
        is_asked_for = isinstance(choice.stop, str) or choice.stop in self._request.sampling.stop_token_ids
        return {
            "finish_reason": choice.finish_reason,
            "matched_stop": choice.stop,
            "stop_reason": choice.stop if is_asked_for else None,
        }

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        is_counted = kind == self.chunk_object and choices and self._request.shows_usage_always
        return {
            **({"usage": self._usage()} if is_counted else {}),
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
        """Return ids and logprobs for training, if requested."""
        if not self._request.shows_token_ids:
            return {}
        return {
            "token_ids": [token.number for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
        }

    def _prompt_fields(self, index: int) -> dict[str, Any]:
        """Return the prompt's ids and logprobs, if requested."""
        request = self._request
        fields: dict[str, Any] = {}
        if request.shows_token_ids:
            fields["prompt_token_ids"] = list(request.prompt_of(index).input_ids)
        if request.num_prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._logprobs.prompt(
                request.prompt_of(index).input_ids, self._choices[index], num_top=request.num_prompt_logprobs
            )
        return fields

    def _usage(self) -> dict[str, Any]:
        firsts = self._choices[:: self._request.num_choices]  # a prompt counts once, whatever its number of choices
        num_prompt = sum(choice.num_prompt_tokens for choice in firsts)
        num_output = self._num_tokens
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
        """Return the answer, when all choices have ended; with the prompt's ids once, if requested."""
        return {**super().whole(), **self._prompt_fields(0)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the event with the role."""
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
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        return {
            "message": message,
            "logprobs": self._chat_logprobs(choice.tokens),
            **self._ending(index),
            **self._token_fields(choice.tokens),
        }

    def _delta_choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        has_content = delta.content or not (delta.calls or delta.reasoning)
        message: dict[str, Any] = {"content": delta.content} if has_content else {}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.calls:
            message["tool_calls"] = [
                {"index": number, **_call_json(call)} for number, call in enumerate(delta.calls, delta.first_call)
            ]
        fields = {"delta": message, "logprobs": self._chat_logprobs(delta.tokens), **self._token_fields(delta.tokens)}
        return self._entry(index, fields)

    def _empty(self) -> dict[str, Any]:
        return {"delta": {}}

    def _chat_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        return self._logprobs.chat(tokens) if self._request.shows_logprobs else None


class CompletionFormat(ResponseFormat):
    """Answers of /v1/completions."""

    whole_object = chunk_object = "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the event with the prompt's text, ids and logprobs, as far as requested."""
        fields = self._prompt_fields(index)
        if self._request.echoes_prompt:
            fields |= {"text": self._prompt_text(index), "logprobs": self._completion_logprobs(index, ())}
        return self._frame(self.chunk_object, [self._entry(index, {"text": "", **fields})]) if fields else None

    def _whole_choice(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        return {
            "text": self._prompt_text(index) + choice.content,
            "logprobs": self._completion_logprobs(index, choice.tokens),
            **self._ending(index),
            **self._prompt_fields(index),
            **self._token_fields(choice.tokens),
        }

    def _delta_choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        fields = {"text": delta.content, "logprobs": self._completion_logprobs(index, delta.tokens, has_prompt=False)}
        return self._entry(index, {**fields, **self._token_fields(delta.tokens)})

    def _empty(self) -> dict[str, Any]:
        return {"text": ""}

    def _prompt_text(self, index: int) -> str:
        """Return the part of the prompt that the answer repeats."""
        prompt = index // self._request.num_choices
        if self._request.echoes_prompt and prompt not in self._prompt_texts:
            stream = IncrementalDetokenizer(self._texts)
            text = "".join(map(stream.add, self._request.prompt_of(index).input_ids)) + stream.finish()
            self._prompt_texts[prompt] = text
        return self._prompt_texts.get(prompt, "")

    def _completion_logprobs(
        self, index: int, tokens: Sequence[Token], *, has_prompt: bool = True
    ) -> dict[str, Any] | None:
        if not self._request.shows_logprobs:
            return None
        shows_prompt = has_prompt and self._request.echoes_prompt
        return self._logprobs.completion(
            tokens,
            prompt_ids=self._request.prompt_of(index).input_ids if shows_prompt else (),
            scores=self._choices[index].prompt_scores if shows_prompt else (),
            first_offset=len(self._prompt_text(index)),
        )


def spans_json(spans: Sequence[VersionSpan]) -> list[dict[str, int]]:
    """Return spans as JSON."""
    return [{"num_tokens": span.num_tokens, "policy_version": span.policy_version} for span in spans]


def _call_json(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments_json(call.arguments)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
