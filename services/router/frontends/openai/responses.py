"""Answers in the forms of OpenAI, whole and in pieces, with what Penstock adds to them."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from penstock.model.detokenize import TokenTexts
from penstock.records import VersionSpan
from services.router.frontends.openai.choice import Choice, Piece, Token
from services.router.frontends.openai.parsed_request import Asked
from services.router.frontends.openai.tool_calls import CallText

VERSION_HEADER = "x-penstock-policy-version"


class Form:
    """One answer; subclasses know how a page's choices look."""

    whole_kind: str
    piece_kind: str

    def __init__(self, asked: Asked, choices: Sequence[Choice], texts: TokenTexts, *, model: str) -> None:
        """Tell of `choices` as they are when a method is called."""
        self._asked = asked
        self._choices = choices
        self._texts = texts
        self._model = model
        self._created = int(time.time())

    def whole(self) -> dict[str, Any]:
        """The answer, when all choices have ended."""
        choices = [self._entry(index, self._whole_choice(index)) for index in range(len(self._choices))]
        return {**self._frame(self.whole_kind, choices), "usage": self._usage(), "penstock": self._extra()}

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says of a choice before its first piece."""
        raise NotImplementedError

    def piece(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """A piece as a stream says it; None where there is nothing to say yet."""
        asked, has_more = self._asked, bool(piece.content or piece.calls)
        if not has_more and not (piece.tokens and (asked.shows_token_ids or asked.shows_logprobs)):
            return None
        return self._frame(self.piece_kind, [self._piece_choice(index, piece)])

    def closing(self, index: int, *, is_last: bool) -> dict[str, Any]:
        """How a choice ended; the last one's tells what Penstock adds."""
        choice = self._entry(index, {**self._empty(), "finish_reason": self._choices[index].finish_reason})
        frame = self._frame(self.piece_kind, [choice])
        return {**frame, "penstock": self._extra()} if is_last else frame

    def usage(self) -> dict[str, Any]:
        """The last chunk of a stream that was asked to count."""
        return {**self._frame(self.piece_kind, []), "usage": self._usage()}

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer; a stream's are those of its beginning."""
        return {VERSION_HEADER: str(self._version), "x-request-id": self._asked.request_id}

    def _whole_choice(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def _piece_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _empty(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def _version(self) -> int:
        return max(choice.newest_version for choice in self._choices)

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._asked.request_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": f"policy-{self._version}",
            "choices": choices,
        }

    def _entry(self, index: int, fields: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "logprobs": None, "finish_reason": None, **fields}

    def _token_fields(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Ids and logprobs for training, where they were asked for."""
        if not self._asked.shows_token_ids:
            return {}
        return {
            "token_ids": [token.number for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
        }

    def _prompt_fields(self, index: int) -> dict[str, Any]:
        if not self._asked.shows_token_ids:
            return {}
        return {"prompt_token_ids": list(self._asked.prompt_of(index).input_ids)}

    def _usage(self) -> dict[str, Any]:
        firsts = self._choices[:: self._asked.num_choices]  # a prompt counts once, however many its choices
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
            "request_id": self._asked.request_id,
            "session_id": self._asked.session_id,
            "is_recorded": self._asked.is_recorded,
            "policy_version_spans": [spans_json(choice.version_spans) for choice in self._choices],
        }


class ChatForm(Form):
    """Answers of /v1/chat/completions."""

    whole_kind = "chat.completion"
    piece_kind = "chat.completion.chunk"

    def whole(self) -> dict[str, Any]:
        """The answer, when all choices have ended; with the prompt's ids once, where they were asked for."""
        return {**super().whole(), **self._prompt_fields(0)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role."""
        choice = self._entry(index, {"delta": {"role": "assistant", "content": ""}})
        return {**self._frame(self.piece_kind, [choice]), **self._prompt_fields(index)}

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

    def _piece_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece.content} if piece.content or not piece.calls else {}
        if piece.calls:
            first = len(self._choices[index].calls) - len(piece.calls)
            delta["tool_calls"] = [
                {"index": first + place, **_call_json(call)} for place, call in enumerate(piece.calls)
            ]
        fields = {"delta": delta, "logprobs": self._logprobs(piece.tokens), **self._token_fields(piece.tokens)}
        return self._entry(index, fields)

    def _empty(self) -> dict[str, Any]:
        return {"delta": {}}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._asked.shows_logprobs:
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


class CompletionForm(Form):
    """Answers of /v1/completions."""

    whole_kind = piece_kind = "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        """The prompt's ids, where they were asked for."""
        fields = self._prompt_fields(index)
        return self._frame(self.piece_kind, [self._entry(index, {"text": "", **fields})]) if fields else None

    def _whole_choice(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        return {
            "text": choice.content,
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
            **self._prompt_fields(index),
            **self._token_fields(choice.tokens),
        }

    def _piece_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        fields = {"text": piece.content, "logprobs": self._logprobs(piece.tokens)}
        return self._entry(index, {**fields, **self._token_fields(piece.tokens)})

    def _empty(self) -> dict[str, Any]:
        return {"text": ""}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._asked.shows_logprobs:
            return None
        return {
            "tokens": [self._texts.name_of(token.number) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": None,
            "text_offset": [token.offset for token in tokens],
        }


def spans_json(spans: Sequence[VersionSpan]) -> list[dict[str, int]]:
    """Spans as JSON."""
    return [{"num_tokens": span.num_tokens, "policy_version": span.policy_version} for span in spans]


def _call_json(call: CallText) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
