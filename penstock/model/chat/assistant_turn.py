"""Parses one turn of the policy into reasoning, content and tool calls. Pure.

Invariant: nothing is lost. `text` is the whole turn; a block that is marked as a call but unreadable is in
`malformed_calls`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from penstock.model.chat.call_block import CallFormat
from penstock.model.chat.reasoning import ReasoningReader
from penstock.model.chat.tool_calls import MalformedCall, ToolCallReader
from penstock.records import ToolCall


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurn:
    """One turn of a policy."""

    text: str
    """The whole turn, without special tokens; marks such as `<think>` and `<tool_call>` are in it."""
    reasoning: str = ""
    """The text before `</think>`; the whole text if the thinking was never closed."""
    content: str = ""
    """The text without reasoning and calls."""
    calls: tuple[ToolCall, ...] = ()
    """The calls in order. Calls inside reasoning do not count."""
    malformed_calls: tuple[str, ...] = ()
    """Blocks that are marked as calls but cannot be read as calls."""

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        call_format: CallFormat = "hermes",
        tools: Sequence[Mapping[str, Any]] = (),
        is_thinking: bool = False,
    ) -> Self:
        """Parse `text`.

        Args:
            text: The policy's turn.
            call_format: How its model writes calls (`Renderer.call_format`).
            tools: Schemas in OpenAI's form, which type the values of the xml form.
            is_thinking: Whether the generation prompt has opened `<think>` (`Renderer.opens_thinking`).
        """
        thinking = ReasoningReader(is_open=is_thinking)
        spoken = [thinking.add(text), thinking.finish()]
        reader = ToolCallReader(call_format, tools)
        found = [each for piece in spoken for each in reader.add(piece.content)] + reader.finish()
        return cls(
            text=text,
            reasoning="".join(piece.reasoning for piece in spoken),
            content="".join(each for each in found if isinstance(each, str)).strip(),
            calls=tuple(each for each in found if isinstance(each, ToolCall)),
            malformed_calls=tuple(each.block for each in found if isinstance(each, MalformedCall)),
        )
