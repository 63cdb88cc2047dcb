"""Parses the text between `<tool_call>` and `</tool_call>`, in both forms that models write. Pure.

    hermes                                          xml
    {"name": "add", "arguments": {"a": 1}}          <function=add>
                                                    <parameter=a>
                                                    1
                                                    </parameter>
                                                    </function>

Invariants: a block is read completely or not at all; reading takes time linear in its length, whatever it holds.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from penstock.model.chat.argument_values import parameter_types, read_json, typed_value
from penstock.records import ToolCall
from penstock.runtime.text import printable

CallFormat: TypeAlias = Literal["hermes", "xml"]
"""How a model writes tool calls. hermes: JSON, as Qwen2.5 and Qwen3 do. xml: `<function=name>` and `<parameter=name>`,
as Qwen3-Coder and Qwen3.5 do."""

_FUNCTION, _PARAMETER, _PARAMETER_END, _FUNCTION_END = "<function=", "<parameter=", "</parameter>", "</function>"
_TAG = re.compile("|".join(map(re.escape, (_FUNCTION, _PARAMETER, _PARAMETER_END, _FUNCTION_END))))
_Tag: TypeAlias = tuple[str, int, int]
"""The tag, and its characters [start, stop)."""


def read_block(
    block: str, call_format: CallFormat, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[ToolCall, ...] | None:
    """Return the calls that a block holds, usually one; None if it cannot be read.

    Args:
        block: The text between the marks.
        call_format: The form.
        tools: Schemas in OpenAI's form, which type the values of the xml form.
    """
    if call_format == "xml":
        return _XmlBlock(block, tools).read()
    try:
        match read_json(block):
            case {"name": str(name), "arguments": dict(arguments)} if name:
                return (ToolCall(name=name, arguments=arguments),)
    except ValueError:
        pass
    return None


class _XmlBlock:
    """Reads one block, tag by tag.

    A value may quote tags: `</parameter>` ends it only before the next parameter, the function's end or the block's
    end. As in published parsers, end tags may be missing. So a value also ends before `<parameter=` at the start of a
    line and before the function's end, and a function also ends with the block.
    """

    def __init__(self, block: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self._block = block
        self._tools = tools
        self._tags = [(tag[0], tag.start(), tag.end()) for tag in _TAG.finditer(block)]
        self._calls: list[ToolCall] = []
        self._function: str | None = None
        self._arguments: dict[str, Any] = {}
        self._parameter: str | None = None
        self._has_quoted_end = False
        """Whether the value so far holds a `</parameter>` that did not end it."""
        self._offset = 0
        """Start of the unread text."""

    def read(self) -> tuple[ToolCall, ...] | None:
        for tag, following in itertools.zip_longest(self._tags, self._tags[1:]):
            if not self._take(tag, following):
                return None
        if self._parameter is not None and not self._end_value(len(self._block)):
            return None
        if self._block[self._offset :].strip():
            return None
        if self._function is not None:
            self._end_function()
        return tuple(self._calls) or None

    def _take(self, tag: _Tag, following: _Tag | None) -> bool:
        """Read one tag; return whether the block is valid so far."""
        kind, start, end = tag
        if self._parameter is not None:
            if not self._ends_value(tag, following):
                self._has_quoted_end |= kind == _PARAMETER_END
                return True
            if kind == _PARAMETER_END:
                self._has_quoted_end = False
                self._end_value(start)
                self._offset = end
                return True
            if not self._end_value(start):
                return False
        if self._block[self._offset : start].strip():
            return False
        self._offset = end
        match kind, self._function:
            case "<function=", None:
                self._function, self._arguments = self._name(), {}
                return bool(self._function)
            case "<parameter=", str():
                self._parameter = self._name()
                return bool(self._parameter)
            case "</function>", str():
                self._end_function()
                return True
        return False

    def _ends_value(self, tag: _Tag, following: _Tag | None) -> bool:
        kind, start, end = tag
        next_kind, next_start = following[:2] if following else (None, len(self._block))
        match kind:
            case "</parameter>":
                may_follow: tuple[str | None, ...] = (_PARAMETER, _FUNCTION_END, None)
            case "</function>":
                may_follow = (_FUNCTION, None)
            case "<parameter=":
                return self._block[start - 1] == "\n"
            case _:
                return False
        return next_kind in may_follow and not self._block[end:next_start].strip()

    def _end_value(self, stop: int) -> bool:
        """Store the value; return whether it certainly ends here."""
        assert self._function is not None
        assert self._parameter is not None
        value = printable(self._block[self._offset : stop]).removeprefix("\n").removesuffix("\n")
        types = parameter_types(self._tools, self._function, self._parameter)
        self._arguments[self._parameter] = typed_value(value, types)
        self._parameter, self._offset = None, stop
        return not self._has_quoted_end

    def _end_function(self) -> None:
        assert self._function is not None
        self._calls.append(ToolCall(name=self._function, arguments=self._arguments))
        self._function = None

    def _name(self) -> str:
        """Return the name that ends with `>`; empty if there is none."""
        stop = self._block.find(">", self._offset)
        name = self._block[self._offset : max(stop, self._offset)].strip()
        self._offset = stop + 1
        return "" if "<" in name or "\n" in name else printable(name)
