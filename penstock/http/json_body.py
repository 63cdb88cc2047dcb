"""Parses JSON from clients into values that can always be encoded again, numbers unchanged.

Lone surrogates, which JSON can escape but UTF-8 cannot encode, become U+FFFD. NaN, Infinity, numbers too large to be
kept, bytes that are not UTF-8, and very deep nesting are rejected.
"""

import collections
import functools
import json
import math
import re
from typing import Any

from penstock.errors import InvalidRequestError
from penstock.runtime.text import printable

_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MAX_DEPTH = 64
_MAX_KEYS = 4096
"""Far more than any request needs, and few enough to report each unknown key."""
_MAX_INTEGER_CHARS = 100
"""Longest integer: one of 256 bits has 78 digits, and all that are taken are in the range of a float."""
_SHOWN_CHARS = 20


class MalformedJsonError(InvalidRequestError):
    """A body that is not JSON."""


def parse_json(data: bytes, *, unique_keys: bool = False, numbers_as_text: bool = False) -> Any:
    """Return the value in `data`.

    Args:
        data: JSON, in UTF-8.
        unique_keys: Reject an object with a duplicate key or with thousands of keys; otherwise the last value counts.
        numbers_as_text: Return numbers as `str`, as they were written and of any size.

    Raises:
        MalformedJsonError: `data` is not JSON, holds NaN, Infinity or a number that is too large, is nested too deeply,
            or an object is rejected.
    """
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=str if numbers_as_text else _float,
            parse_int=str if numbers_as_text else _integer,
            object_pairs_hook=_unique if unique_keys else None,
        )
        if _ESCAPED_SURROGATE.search(data):
            value = _mended(value, 0)
    except UnicodeDecodeError as error:
        raise MalformedJsonError(f"the body is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from None
    except json.JSONDecodeError as error:
        raise MalformedJsonError(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise MalformedJsonError("the body is nested too deeply") from None
    return value


def _refuse_constant(name: str) -> Any:
    raise MalformedJsonError(f"the body holds {name}, which is not a JSON number; send a finite number or leave it out")


def _integer(digits: str) -> int:
    if len(digits) > _MAX_INTEGER_CHARS:
        raise MalformedJsonError(
            f"the body holds an integer of {len(digits)} characters; send at most {_MAX_INTEGER_CHARS}"
        )
    return int(digits)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
        raise MalformedJsonError(f"the body holds {shown}, which is beyond the range of a float; send a smaller number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise MalformedJsonError(f"the body has {printable(twice)!r} twice in one object; send it once")
    if len(found) > _MAX_KEYS:
        raise MalformedJsonError(f"the body has an object with {len(found)} keys; send at most {_MAX_KEYS}")
    return found


def _mended(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise RecursionError
    mended = functools.partial(_mended, depth=depth + 1)
    match value:
        case str():
            return printable(value)
        case list():
            return [mended(each) for each in value]
        case dict():
            return {printable(key): mended(each) for key, each in value.items()}
    return value
