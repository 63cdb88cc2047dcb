"""Separates text and tool calls of an answer, at once or while it is generated. Pure.

    I add.
    <tool_call>
    {"name": "add", "arguments": {"a": 1}}
    </tool_call>

Invariants: nothing is lost: a block that looks like a call but is not one (unreadable, no end) is passed on with its
marks. The time is linear in the text, whatever its pieces.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from penstock.model.chat.call_block import CallFormat, read_block
from penstock.model.chat.marks import SpaceHolder, held_back
from penstock.records import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """A block that is marked as a call but cannot be read as one."""

    block: str
    """The text between the marks."""
    is_closed: bool

    @property
    def text(self) -> str:
        """The whole block, with its marks."""
        return f"{OPEN}{self.block}{CLOSE if self.is_closed else ''}"


Found: TypeAlias = str | ToolCall | MalformedCall


class ToolCallReader:
    """Reads one answer; white space around calls is dropped."""

    def __init__(self, call_format: CallFormat, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Start with no text.

        Args:
            call_format: How the model writes calls.
            tools: Schemas in OpenAI's form, which type the values of the xml form.
        """
        self._call_format = call_format
        self._tools = tools
        self._tail = ""
        """Text that may become a mark."""
        self._space = SpaceHolder(is_after_mark=False)
        self._block: list[str] | None = None
        """The text of the unfinished block; None outside of blocks."""

    def add(self, text: str) -> list[Found]:
        """Add text; return the items that are final, in order."""
        found: list[Found] = []
        text, self._tail = self._tail + text, ""
        offset = 0
        while (stop := text.find(mark := self._mark, offset)) >= 0:
            self._pass_on(text[offset:stop], found)
            offset = stop + len(mark)
            if self._block is None:
                self._block = []
            else:
                self._end_block(found)
        end = len(text) - held_back(text[offset:], mark)
        self._tail = text[end:]
        self._pass_on(text[offset:end], found)
        return [each for each in found if each]

    def finish(self) -> list[Found]:
        """Return the held-back text; nothing follows."""
        found: list[Found] = []
        self._pass_on(self._tail, found)
        self._tail = ""
        found.append(self._space.take())
        if self._block is not None:
            found.append(MalformedCall(block="".join(self._block), is_closed=False))
            self._block = None
        return [each for each in found if each]

    @property
    def _mark(self) -> str:
        return OPEN if self._block is None else CLOSE

    def _pass_on(self, text: str, found: list[Found]) -> None:
        if self._block is None:
            found.append(self._space.add(text))
        else:
            self._block.append(text)

    def _end_block(self, found: list[Found]) -> None:
        block = "".join(self._block or ())
        self._block = None
        if calls := read_block(block, self._call_format, self._tools):
            self._space.meet_mark()
            found += calls
        else:
            found += [self._space.take(), MalformedCall(block=block, is_closed=True)]
