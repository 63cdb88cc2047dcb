"""One choice of an answer while it is generated: chunks of tokens in, text and tool calls out. Pure.

Invariant: with a stop string, the tokens end with the one that completed it; the text ends before it.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from penstock.model.detokenize import TextStream, TokenTexts
from penstock.model.tool_calls import Found, MalformedCall, ToolCallReader
from penstock.records import ToolCall, VersionSpan
from penstock.v1 import generate_pb2
from services.router.frontends.openai.stop import StopFinder

Ending: TypeAlias = Literal["stop", "length"]

_ENDINGS: dict[int, Ending] = {
    generate_pb2.FINISH_REASON_STOP: "stop",
    generate_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token that the policy sampled."""

    number: int
    logprob: float
    policy_version: int
    offset: int
    """Characters that were complete before it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """What a chunk adds to a choice."""

    tokens: Sequence[Token]
    content: str
    calls: Sequence[ToolCall]
    is_last: bool


class Choice:
    """What was generated so far."""

    def __init__(
        self, texts: TokenTexts, *, stops: Sequence[str], calls: ToolCallReader | None, has_one_call: bool = False
    ) -> None:
        """Nothing was generated yet.

        Args:
            texts: What the ids say.
            stops: Texts that end the choice.
            calls: Tells tool calls apart from text; None to leave them in it.
            has_one_call: Whether the first tool call ends the choice.
        """
        self.tokens: list[Token] = []
        self.content = ""
        self.calls: list[ToolCall] = []
        self.ending: Ending | None = None
        """Why it ended; None while it goes on."""
        self.was_cut = False
        """Whether it ended before the engine ended it, which must then be aborted there."""
        self.newest_version = 0
        """The newest policy version that made one of its tokens; 0 before the first."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._stream = TextStream(texts)
        self._stops = StopFinder(stops)
        self._calls = calls
        self._has_one_call = has_one_call
        self._num_chars = 0

    def take(self, chunk: generate_pb2.GenerateChunk) -> ChoiceDelta:
        """Add what the engine delivered."""
        if chunk.HasField("usage") and not self.tokens:
            self.num_prompt_tokens = chunk.usage.num_prompt_tokens
            self.num_cached_tokens = chunk.usage.num_cached_tokens
        num_tokens, num_calls, content = len(self.tokens), len(self.calls), ""
        versions = itertools.chain.from_iterable(
            itertools.repeat(span.policy_version, span.num_tokens) for span in chunk.version_spans
        )
        for number, logprob, version in zip(chunk.output_ids, chunk.logprobs, versions, strict=True):
            content += self._take_token(number, logprob, version)
            if self.ending is not None:
                break
        else:
            self.ending = _ENDINGS.get(chunk.finish_reason)
            if self.ending is not None:
                content += self._sort(self._stops.add(self._stream.finish()) + self._stops.finish())
        if self.ending is not None and self._calls is not None and not self._is_full:
            content += self._collect(self._calls.finish())
        self.content += content
        return ChoiceDelta(
            tokens=self.tokens[num_tokens:],
            content=content,
            calls=self.calls[num_calls:],
            is_last=self.ending is not None,
        )

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        return "tool_calls" if self.calls and self.ending == "stop" else self.ending or ""

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Which policy version made which tokens."""
        return spans_of(self.tokens)

    @property
    def _is_full(self) -> bool:
        """Whether it has the one call that it may have."""
        return self._has_one_call and bool(self.calls)

    def _take_token(self, number: int, logprob: float, version: int) -> str:
        """Add one token; return the content that is certain with it."""
        self.tokens.append(Token(number=number, logprob=logprob, policy_version=version, offset=self._num_chars))
        self.newest_version = max(self.newest_version, version)
        text = self._stream.add(number)
        self._num_chars += len(text)
        content = self._sort(self._stops.add(text))
        if self._stops.found or self._is_full:
            self.ending, self.was_cut = "stop", True
        return content

    def _sort(self, text: str) -> str:
        """Tell text and tool calls apart: keep the calls, return the text."""
        if self._calls is None or not text:
            return text
        return self._collect(self._calls.add(text))

    def _collect(self, found: Iterable[Found]) -> str:
        content = ""
        for each in found:
            if self._is_full:
                break
            match each:
                case ToolCall():
                    self.calls.append(each)
                case MalformedCall():
                    content += each.text
                case str():
                    content += each
        return content


def spans_of(tokens: Iterable[Token]) -> tuple[VersionSpan, ...]:
    """Runs of tokens that one policy version made."""
    return tuple(
        VersionSpan(num_tokens=len(list(run)), policy_version=version)
        for version, run in itertools.groupby(token.policy_version for token in tokens)
    )
