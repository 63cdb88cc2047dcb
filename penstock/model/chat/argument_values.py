"""Values of a tool call's arguments: JSON that any encoding can carry, and text typed by a schema. Pure.

Invariant: no value is lost. Text that does not fit its schema's types stays text.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.runtime.text import printable

_MAX_DEPTH = 64
_MAX_SCHEMA_DEPTH = 8
_NUMBER = frozenset("0123456789+-.eE")


def read_json(text: str) -> Any:
    """Return the JSON value in `text`; lone surrogates, which escapes can spell, become U+FFFD.

    Raises:
        ValueError: it is not JSON, holds NaN or Infinity, or is nested more than 64 levels deep.
    """
    try:
        value = json.loads(text)
        if not _is_shallow(value, _MAX_DEPTH):
            raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")
        return json.loads(arguments_json(value))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def arguments_json(arguments: Any) -> str:
    """Return the arguments as JSON for any encoding: lone surrogates become U+FFFD.

    Raises:
        ValueError: they hold NaN or Infinity, which are not JSON.
    """
    return printable(json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def parameter_types(tools: Sequence[Mapping[str, Any]], function: str, parameter: str) -> list[str]:
    """Return the JSON types that a tool's schema allows for a parameter, in its order; empty if it does not say.

    Args:
        tools: JSON schemas in OpenAI's form.
        function: Name of the tool.
        parameter: Name of the parameter.
    """
    for tool in tools:
        described = tool.get("function", tool)
        if isinstance(described, Mapping) and described.get("name") == function:
            root = described.get("parameters")
            properties = root.get("properties") if isinstance(root, Mapping) else None
            schema = properties.get(parameter) if isinstance(properties, Mapping) else None
            return list(dict.fromkeys(_types(schema, root, _MAX_SCHEMA_DEPTH)))
    return []


def typed_value(text: str, types: Sequence[str]) -> Any:
    """Return the value that `text` spells, with the first of these types that it fits, else the text itself.

    Without types, the text is read as JSON if it is JSON. `None`, `True` and `False` are read as well, because
    templates write earlier calls in Python's spelling. A value that may be a string is null only if null is allowed,
    too.
    """
    if text.strip() in ("null", "None") and ("null" in types or (types and "string" not in types)):
        return None
    for each in types:
        if each == "string":
            return text
        try:
            return _READERS[each](text)
        except (KeyError, ValueError):
            continue
    try:
        return text if types else read_json(text)
    except ValueError:
        return text


def _types(schema: Any, root: Any, depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return
    match schema.get("type"):
        case str(name):
            yield name
            return
        case [*names]:
            yield from (name for name in names if isinstance(name, str))
            return
    if isinstance(reference := schema.get("$ref"), str):
        yield from _types(_resolved(reference, root), root, depth - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(key), list):
            for option in options:
                yield from _types(option, root, depth - 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    for value in values if isinstance(values, list) else []:
        yield _TYPE_NAMES.get(type(value), "object")


def _resolved(reference: str, root: Any) -> Any:
    """Return the target of `#/$defs/Name` in the schema; None if there is none."""
    if not reference.startswith("#/"):
        return None
    for step in reference[2:].split("/"):
        root = root.get(step) if isinstance(root, Mapping) else None
    return root


def _integer(text: str) -> int:
    number = _number(text)
    if number != int(number):
        raise ValueError(text)
    return int(number)


def _number(text: str) -> float:
    stripped = text.strip()
    if not _NUMBER.issuperset(stripped):
        raise ValueError(text)
    try:
        return int(stripped)
    except ValueError:
        number = float(stripped)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.strip().lower()]


def _container(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = read_json(text)
        if not isinstance(value, kind):
            raise ValueError(text)
        return value

    return read


_READERS: dict[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _container(dict),
    "array": _container(list),
}
_TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}


def _is_shallow(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    return depth > 0 and all(
        _is_shallow(each, depth - 1) for each in (value.values() if isinstance(value, dict) else value)
    )
