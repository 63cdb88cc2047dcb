"""One choice of an answer while it is generated: chunks of tokens in, text and tool calls out. Pure.

Invariant: with a stop string, the tokens end with the token that completed it; the text ends before it.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from penstock.model.chat.reasoning import ReasoningReader, Spoken, ThoughtSplitter
from penstock.model.chat.tool_calls import Found, MalformedCall, ToolCallReader
from penstock.model.detokenize import IncrementalDetokenizer, TokenTexts
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
    """Number of complete characters before it."""
    top: Sequence[tuple[int, float]] = ()
    """The most likely ids at its position with their logprobs, most likely first, if they were requested."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptScore:
    """The model's score of one token of the prompt."""

    logprob: float
    top: Sequence[tuple[int, float]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceDelta:
    """The part that a chunk adds to a choice."""

    tokens: Sequence[Token]
    content: str
    reasoning: str
    calls: Sequence[ToolCall]
    first_call: int
    """Number of the choice's calls before these."""
    newest_version: int
    """The newest policy version among the choice's tokens up to its end."""
    is_last: bool


class Choice:
    """The choice as generated so far."""

    def __init__(
        self,
        texts: TokenTexts,
        *,
        stops: Sequence[str],
        calls: ToolCallReader | None,
        has_one_call: bool = False,
        includes_stop: bool = False,
        begun_call: str = "",
        thoughts: ReasoningReader | ThoughtSplitter | None = None,
        separates_reasoning: bool = False,
        has_tokens: bool = True,
    ) -> None:
        """Start empty.

        Args:
            texts: The text of ids.
            stops: Texts that end the choice.
            calls: Separates tool calls from text; None to leave them in it.
            has_one_call: Whether the first tool call ends the choice.
            includes_stop: Whether the text ends with the stop that was found.
            begun_call: The beginning of a tool call that the choice continues.
            thoughts: Tells reasoning, which holds no calls, from content; None if all is content.
            separates_reasoning: Whether reasoning is apart from content; otherwise it is the beginning of it.
            has_tokens: Whether to keep any of its tokens; the engine always generates one.
        """
        self.tokens: list[Token] = []
        self.content = ""
        self.reasoning = ""
        self.calls: list[ToolCall] = []
        self.ending: Ending | None = None
        """Why it ended; None while it continues."""
        self.was_cut = False
        """Whether it ended before the engine ended it, so that it must be aborted there."""
        self.newest_version = 0
        """The newest policy version among its tokens; 0 before the first."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.replica_id = ""
        """The engine that its last chunk came from."""
        self.began = 0.0
        """When its first chunk came, by `time.monotonic()`."""
        self.ended = 0.0
        """When its last chunk came."""
        self.stop: str | int | None = None
        """The stop string or id that ended it."""
        self._prompt_logprobs = generate_pb2.PromptLogprobs()
        self._stream = IncrementalDetokenizer(texts)
        self._stops = StopFinder(stops, includes_stop=includes_stop)
        self._thoughts = thoughts
        self._separates_reasoning = separates_reasoning
        self._calls = calls
        self._has_one_call = has_one_call
        self._has_tokens = has_tokens
        if begun_call and self._calls is not None:
            self._calls.add(begun_call)
        self._num_chars = 0

    def take(self, chunk: generate_pb2.GenerateChunk, *, at: float = 0.0) -> ChoiceDelta:
        """Add a chunk from the engine, which came `at` a time of `time.monotonic()`."""
        self.replica_id, self.ended = chunk.replica_id, at
        if not self.tokens:
            self.began = at
        if chunk.HasField("usage") and not self.tokens:
            self.num_prompt_tokens = chunk.usage.num_prompt_tokens
            self.num_cached_tokens = chunk.usage.num_cached_tokens
        if chunk.HasField("prompt_logprobs"):
            self._prompt_logprobs = chunk.prompt_logprobs
        if not self._has_tokens:
            return self._end_without_tokens(chunk)
        num_tokens, num_calls, content = len(self.tokens), len(self.calls), ""
        num_thought = len(self.reasoning)
        versions = itertools.chain.from_iterable(
            itertools.repeat(span.policy_version, span.num_tokens) for span in chunk.version_spans
        )
        tops = _top_of_each(chunk.top_logprobs, len(chunk.output_ids))
        for number, logprob, version, top in zip(chunk.output_ids, chunk.logprobs, versions, tops, strict=True):
            content += self._take_token(number, logprob, version, top)
            if self.ending is not None:
                break
        else:
            self.ending = _ENDINGS.get(chunk.finish_reason)
            if self.ending is not None:
                content += self._sort(self._stops.add(self._stream.finish()) + self._stops.finish())
                if self._thoughts is not None:
                    content += self._sort_spoken(self._thoughts.finish())
            if self.ending == "stop":
                self.stop = self._stops.stop or chunk.output_ids[-1]
        if self.was_cut and self._thoughts is not None and not self._is_full:
            content += self._sort_spoken(self._thoughts.finish())
        if self.ending is not None and self._calls is not None and not self._is_full:
            content += self._collect(self._calls.finish())
        self.content += content
        return ChoiceDelta(
            tokens=self.tokens[num_tokens:],
            content=content,
            reasoning=self.reasoning[num_thought:],
            calls=self.calls[num_calls:],
            first_call=num_calls,
            newest_version=self.newest_version,
            is_last=self.ending is not None,
        )

    @property
    def prompt_scores(self) -> Sequence[PromptScore]:
        """Scores of each prompt token but the first, if they were requested. Takes long for a long prompt."""
        return _prompt_scores(self._prompt_logprobs)

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        return "tool_calls" if self.calls and self.ending == "stop" else self.ending or ""

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """The policy version of each run of tokens."""
        return spans_of(self.tokens)

    @property
    def _is_full(self) -> bool:
        """Whether it has its single allowed call."""
        return self._has_one_call and bool(self.calls)

    def _end_without_tokens(self, chunk: generate_pb2.GenerateChunk) -> ChoiceDelta:
        self.newest_version = max(span.policy_version for span in chunk.version_spans)
        self.ending, self.was_cut = "length", True
        return ChoiceDelta(
            tokens=(),
            content="",
            reasoning="",
            calls=(),
            first_call=0,
            newest_version=self.newest_version,
            is_last=True,
        )

    def _take_token(self, number: int, logprob: float, version: int, top: Sequence[tuple[int, float]]) -> str:
        """Add one token; return the content that it makes certain."""
        self.tokens.append(
            Token(number=number, logprob=logprob, policy_version=version, offset=self._num_chars, top=top)
        )
        self.newest_version = max(self.newest_version, version)
        text = self._stream.add(number)
        self._num_chars += len(text)
        content = self._sort(self._stops.add(text))
        if self._stops.found or self._is_full:
            self.ending, self.was_cut = "stop", True
            self.stop = self._stops.stop
        return content

    def _sort(self, text: str) -> str:
        """Separate reasoning, text and tool calls: keep the calls and separate reasoning, return the text."""
        if not text:
            return ""
        return self._sort_spoken(Spoken(content=text) if self._thoughts is None else self._thoughts.add(text))

    def _sort_spoken(self, spoken: Spoken) -> str:
        content = spoken.content
        if self._calls is not None and content:
            content = self._collect(self._calls.add(content))
        if not self._separates_reasoning:
            return spoken.reasoning + content
        self.reasoning += spoken.reasoning
        return content

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


def _top_of_each(top: Sequence[generate_pb2.TopLogprobs], count: int) -> list[Sequence[tuple[int, float]]]:
    """Return the most likely ids at each of `count` positions; empty if they were not requested."""
    return [tuple(zip(each.ids, each.logprobs, strict=True)) for each in top] or [()] * count


def _prompt_scores(scores: generate_pb2.PromptLogprobs) -> Sequence[PromptScore]:
    tops = _top_of_each(scores.top_logprobs, len(scores.logprobs))
    return [PromptScore(logprob=logprob, top=top) for logprob, top in zip(scores.logprobs, tops, strict=True)]


def spans_of(tokens: Iterable[Token]) -> tuple[VersionSpan, ...]:
    """Return the runs of tokens with the same policy version."""
    return tuple(
        VersionSpan(num_tokens=len(list(run)), policy_version=version)
        for version, run in itertools.groupby(token.policy_version for token in tokens)
    )
