"""A parsed request, the same for chats and completions: prompts as ids, and how to answer them.

Invariant: ids that a call keeps while it waits are int32, a ninth of what Python's own ints take.
"""

import array
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.model.chat.call_block import CallFormat
from penstock.v1 import common_pb2, generate_pb2


def pack_ids(ids: Iterable[int]) -> "array.array[int]":
    """Return the ids as int32; themselves if they are packed."""
    return ids if isinstance(ids, array.array) else array.array("i", ids)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptIds:
    """A prompt as engines take it: one placeholder for each image."""

    input_ids: "array.array[int]"
    """int32; see `pack_ids`."""
    images: Sequence[bytes] = ()
    stored_images: Sequence[common_pb2.StoredImage] = ()
    """Images that the engine fetches itself, in place of `images`."""

    @property
    def size_bytes(self) -> int:
        """Memory that ids and images take."""
        return len(self.input_ids) * self.input_ids.itemsize + sum(map(len, self.images))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """What to generate, and how to answer."""

    request_id: str
    session_id: str
    """Empty: no session."""
    prompts: Sequence[PromptIds]
    num_choices: int
    """Choices of each prompt; those of one prompt follow each other."""
    sampling: generate_pb2.SamplingParams
    stops: Sequence[str]
    includes_stop: bool
    """Whether the text ends with the stop string that was found."""
    has_tokens: bool
    """Whether to return anything but the prompt."""
    begun_call: str
    """The beginning of a tool call that is part of the prompt and belongs to the answer; empty: none."""
    thinks: bool
    """Whether the prompt has opened reasoning."""
    separates_reasoning: bool
    """Whether reasoning is apart from content."""
    reads_tools: bool
    """Whether to separate tool calls from text."""
    call_format: CallFormat
    """The format in which the model writes tool calls."""
    tools: Sequence[Mapping[str, Any]]
    """The tools that it may call."""
    has_one_call: bool
    """Whether the first tool call ends a choice."""
    shows_logprobs: bool
    num_top_logprobs: int
    """Number of most likely tokens to show at each position."""
    num_prompt_logprobs: int | None
    """Number of most likely tokens to show at each position of the prompt; None: no logprobs of it, 0: only its own."""
    names_ids: bool
    """Whether logprobs name tokens by their ids."""
    echoes_prompt: bool
    """Whether the text begins with the prompt's."""
    shows_token_ids: bool
    shows_usage: bool
    """Whether a stream has token counts; other answers always have them."""
    shows_usage_always: bool
    """Whether each chunk of a stream has token counts."""
    is_recorded: bool
    ignored: Sequence[str]
    """Parameters that were accepted though they have no effect."""
    group_id: str = ""
    """Group whose first calls go to the same replica; empty: none."""
    min_policy_version: int = 0
    """The oldest policy version that may answer."""
    exact_policy_version: int = 0
    """The only policy version that may answer; 0: any."""

    def prompt_of(self, choice: int) -> PromptIds:
        """Return the prompt of the choice."""
        return self.prompts[choice // self.num_choices]

    @property
    def num_all(self) -> int:
        """Number of choices of all prompts."""
        return len(self.prompts) * self.num_choices

    @property
    def is_cut_by_text(self) -> bool:
        """Whether the answer's text may end it, so that the engine should deliver token by token."""
        return bool(self.stops) or self.has_one_call

    @property
    def scores_prompt(self) -> bool:
        """Whether the engine is asked for the prompt's logprobs."""
        return self.num_prompt_logprobs is not None or (self.echoes_prompt and self.shows_logprobs)

    @property
    def opens_with_prompt(self) -> bool:
        """Whether a stream begins with the prompt's text or log-probabilities: seconds of work for a long prompt."""
        return self.echoes_prompt or self.num_prompt_logprobs is not None
