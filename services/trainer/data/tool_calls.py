"""Reads the tool calls of an assistant's message in the forms found in data sets.

[{"type": "function", "function": {"name": "zoom", "arguments": "{\\"factor\\": 2}"}}]
[{"name": "zoom", "arguments": {"factor": 2}}]
"""

import json
from collections.abc import Mapping
from typing import Any

from penstock.records import ToolCall
from services.trainer.data.json_values import as_json, without_nulls


def read_tool_calls(value: Any) -> tuple[ToolCall, ...]:
    """Return the calls in `tool_calls`: a list or its JSON text; None or "" means no calls.

    Null arguments of a struct are left out, because a column has one type; those that a text spells stay.

    Raises:
        ValueError: it is something else, or a call has no name or no arguments.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return ()
    is_text = isinstance(value, str)
    calls = _parsed(value) if is_text else value
    match calls:
        case None | "":
            return ()
        case [*found]:
            return tuple(_call(each, is_text=is_text) for each in found)
    raise ValueError(f"tool_calls of type {type(calls).__name__}; want a list in OpenAI's form")


def _call(call: Any, *, is_text: bool) -> ToolCall:
    function = call.get("function") or call if isinstance(call, Mapping) else None
    match function:
        case {"name": str(name), "arguments": given} if name:
            is_text = is_text or isinstance(given, str)
            arguments = _parsed(given) if isinstance(given, str) else given
            if isinstance(arguments, Mapping):
                plain = as_json(arguments)
                return ToolCall(name=as_json(name), arguments=plain if is_text else without_nulls(plain))
    raise ValueError(f"the tool call {repr(call)[:80]}; want its name, and arguments as an object or as JSON text")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a tool call with text that is no JSON: {error}") from None
