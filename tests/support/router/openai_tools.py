"""Tools that tests tell policies of."""

from typing import Any


def _tool(name: str) -> dict[str, Any]:
    numbers = {"type": "object", "properties": {"a": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": numbers}}


ADD, MULTIPLY = _tool("add"), _tool("multiply")
