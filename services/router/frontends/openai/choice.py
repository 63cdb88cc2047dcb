"""One choice of an answer while it comes: chunks of tokens in, text and calls of tools out. Pure.

Invariant: with a stop string, the tokens end with the one that completed it; the text ends before it.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from penstock.model.detokenize import TextStream, TokenTexts
from penstock.records import VersionSpan
from penstock.v1 import generate_pb2
from services.router.frontends.openai.stop import StopFinder
from services.router.frontends.openai.tool_calls import CallText, ToolCallReader

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
class Piece:
    """What a chunk adds to a choice."""

    tokens: Sequence[Token]
    content: str
    calls: Sequence[CallText]
    is_last: bool


class Choice:
    """What was said so far."""

    def __init__(self, texts: TokenTexts, *, stops: Sequence[str], reads_tools: bool) -> None:
        """Nothing was said yet; `reads_tools`: calls of tools are told apart from text."""
        self.tokens: list[Token] = []
        self.content = ""
        self.calls: list[CallText] = []
        self.ending: Ending | None = None
        """Why it ended; None while it goes on."""
        self.was_cut = False
        """Whether a stop string ended it, so that the engine is to be told."""
        self.newest_version = 0
        """The newest policy version that made one of its tokens; 0 before the first."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._stream = TextStream(texts)
        self._stops = StopFinder(stops)
        self._calls = ToolCallReader() if reads_tools else None
        self._num_chars = 0

    def take(self, chunk: generate_pb2.GenerateChunk) -> Piece:
        """Add what the engine delivered."""
        if chunk.HasField("usage") and not self.tokens:
            self.num_prompt_tokens = chunk.usage.num_prompt_tokens
            self.num_cached_tokens = chunk.usage.num_cached_tokens
        num_before, text = len(self.tokens), ""
        versions = itertools.chain.from_iterable(
            itertools.repeat(span.policy_version, span.num_tokens) for span in chunk.version_spans
        )
        for number, logprob, version in zip(chunk.output_ids, chunk.logprobs, versions, strict=True):
            self.tokens.append(
                Token(number=number, logprob=logprob, policy_version=version, offset=self._num_chars)
            )  # fmt: skip
            self.newest_version = max(self.newest_version, version)
            said = self._stream.add(number)
            self._num_chars += len(said)
            text += self._stops.add(said)
            if self._stops.found:
                self.ending, self.was_cut = "stop", True
                break
        else:
            self.ending = _ENDINGS.get(chunk.finish_reason)
            if self.ending is not None:
                text += self._stops.add(self._stream.finish()) + self._stops.finish()
        content, calls = self._sorted(text)
        self.content += content
        self.calls += calls
        return Piece(
            tokens=self.tokens[num_before:], content=content, calls=calls, is_last=self.ending is not None
        )  # fmt: skip

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        return "tool_calls" if self.calls and self.ending == "stop" else self.ending or ""

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Which policy version made which tokens."""
        return spans_of(self.tokens)

    def _sorted(self, text: str) -> tuple[str, list[CallText]]:
        if self._calls is None:
            return text, []
        found = self._calls.add(text)
        if self.ending is not None:
            found += self._calls.finish()
        calls = [each for each in found if isinstance(each, CallText)]
        return "".join(each for each in found if isinstance(each, str)), calls


def spans_of(tokens: Iterable[Token]) -> tuple[VersionSpan, ...]:
    """Runs of tokens that one policy version made."""
    return tuple(
        VersionSpan(num_tokens=len(list(run)), policy_version=version)
        for version, run in itertools.groupby(token.policy_version for token in tokens)
    )
