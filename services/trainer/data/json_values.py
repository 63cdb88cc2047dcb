"""Converts the values of a row to JSON."""

import math
from collections.abc import Mapping
from typing import Any


def as_json(value: Any) -> Any:
    """Return a value that JSON can hold: bytes are dropped, non-finite numbers become None, other types text."""
    match value:
        case None | bool():
            return value
        case int():
            return value if -(2**63) <= value < 2**64 else str(value)  # the bus holds 64-bit integers
        case str():
            return value.encode(errors="replace").decode()
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): as_json(each) for key, each in value.items() if not isinstance(each, bytes)}
        case list() | tuple():
            return [as_json(each) for each in value if not isinstance(each, bytes)]
    return str(value)


def without_nulls(value: Any) -> Any:
    """Return JSON without null fields: a column has one type, so a struct's null fields belong to other rows."""
    match value:
        case dict():
            return {key: without_nulls(each) for key, each in value.items() if each is not None}
        case list():
            return [without_nulls(each) for each in value]
    return value
