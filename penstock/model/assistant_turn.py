"""What a policy said in one turn, taken apart: reasoning, content and tool calls. Pure.

Invariant: nothing is lost. `text` is all of it; what looks like a call and cannot be read is in `malformed_calls`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from penstock.model.call_block import CallFormat
from penstock.model.reasoning import ReasoningReader
from penstock.model.tool_calls import MalformedCall, ToolCallReader
from penstock.records import ToolCall


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurn:
    """One turn of a policy."""

    text: str
    """All that it said, without special tokens; marks such as `<think>` and `<tool_call>` are in it."""
    reasoning: str = ""
    """What it said before `</think>`; all of it if it never closed its thinking."""
    content: str = ""
    """What is left of the text without reasoning and calls."""
    calls: tuple[ToolCall, ...] = ()
    """In their order. Calls inside of reasoning are not calls."""
    malformed_calls: tuple[str, ...] = ()
    """Blocks that are marked as calls and cannot be read as one."""

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        call_format: CallFormat = "hermes",
        tools: Sequence[Mapping[str, Any]] = (),
        is_thinking: bool = False,
    ) -> Self:
        """Take `text` apart.

        Args:
            text: What the policy said.
            call_format: How its model writes calls (`Renderer.call_format`).
            tools: Schemas in OpenAI's form, which give the values of the xml form their types.
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
