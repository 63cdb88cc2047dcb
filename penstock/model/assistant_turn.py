"""What a policy said in one turn, taken apart: reasoning, content and tool calls. Pure.

Invariant: nothing is lost. `text` is all of it; what looks like a call and cannot be read is in `malformed_calls`.
"""

import dataclasses
import json
import re
from typing import Literal, Self, TypeAlias

from penstock.records import ToolCall

CallFormat: TypeAlias = Literal["hermes", "xml"]
"""How a model writes tool calls. hermes: JSON inside `<tool_call>`, as Qwen2.5 and Qwen3 do. xml: `<function=name>` and
`<parameter=name>` inside `<tool_call>`, as Qwen3-Coder and Qwen3.5 do."""

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurn:
    """One turn of a policy."""

    text: str
    """All that it said, without special tokens; marks such as `<think>` and `<tool_call>` are in it."""
    reasoning: str = ""
    """What it said before `</think>`."""
    content: str = ""
    """What is left of the text without reasoning and calls."""
    calls: tuple[ToolCall, ...] = ()
    malformed_calls: tuple[str, ...] = ()
    """Blocks that are marked as calls and cannot be read as one."""

    @classmethod
    def parse(cls, text: str, call_format: CallFormat = "hermes") -> Self:
        """Take `text` apart."""
        before, mark, after = text.partition(_THINK_CLOSE)
        reasoning, said = (before, after) if mark else ("", text)
        calls, malformed = [], []
        for block in _BLOCK.findall(said):
            call = _read_json(block)
            if call is None:
                malformed.append(block)
            else:
                calls.append(call)
        return cls(
            text=text,
            reasoning=reasoning.strip().removeprefix(_THINK_OPEN).strip(),
            content=_BLOCK.sub("", said).strip(),
            calls=tuple(calls),
            malformed_calls=tuple(malformed),
        )


def _read_json(block: str) -> ToolCall | None:
    try:
        match json.loads(block):
            case {"name": str(name), "arguments": dict(arguments)} if name:
                return ToolCall(name=name, arguments=arguments)
    except (ValueError, RecursionError):
        pass
    return None
