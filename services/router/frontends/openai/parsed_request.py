"""What a request asks for, the same for chats and completions: prompts as ids, and how to answer them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.model.call_block import CallFormat
from penstock.v1 import common_pb2, generate_pb2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptIds:
    """A prompt as engines take it: one placeholder for each image."""

    input_ids: Sequence[int]
    images: Sequence[bytes] = ()
    stored_images: Sequence[common_pb2.StoredImage] = ()
    """In place of `images`: those that the engine fetches itself."""


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
    """Whether anything but the prompt is returned."""
    begun_call: str
    """The beginning of a tool call that is part of the prompt and belongs to the answer; empty: none."""
    thinks: bool | None
    """Whether the prompt has opened reasoning, which is told from what is said; None: it is not."""
    reads_tools: bool
    """Whether tool calls are told apart from text."""
    call_format: CallFormat
    """How the model writes them."""
    tools: Sequence[Mapping[str, Any]]
    """What it may call."""
    has_one_call: bool
    """Whether the first tool call ends a choice."""
    shows_logprobs: bool
    num_top_logprobs: int
    """How many of the likeliest tokens to show at each position."""
    num_prompt_logprobs: int | None
    """How many of the likeliest tokens to show at each position of the prompt; None: nothing of it, 0: its own only."""
    names_ids: bool
    """Whether logprobs name tokens by their ids."""
    echoes_prompt: bool
    """Whether the text begins with the prompt's."""
    shows_token_ids: bool
    shows_usage: bool
    """In a stream; other answers have it in any case."""
    shows_usage_always: bool
    """In each chunk of a stream."""
    is_recorded: bool
    ignored: Sequence[str]
    """Parameters that were accepted though they have no effect."""
    group_id: str = ""
    """Group whose first calls go to the same replica; empty: none."""
    min_policy_version: int = 0
    """The oldest policy version that may answer."""
    exact_policy_version: int = 0
    """The only one that may; 0: any."""

    def prompt_of(self, choice: int) -> PromptIds:
        """The prompt that the choice answers."""
        return self.prompts[choice // self.num_choices]

    @property
    def num_all(self) -> int:
        """Choices of all prompts."""
        return len(self.prompts) * self.num_choices

    @property
    def is_cut_by_text(self) -> bool:
        """Whether what the answer says may end it, so that the engine should deliver token by token."""
        return bool(self.stops) or self.has_one_call

    @property
    def scores_prompt(self) -> bool:
        """Whether the engine is asked for the prompt's logprobs."""
        return self.num_prompt_logprobs is not None or (self.echoes_prompt and self.shows_logprobs)
