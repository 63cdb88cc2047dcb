"""JSON as clients send it, made safe at the edge: what leaves here is text that can travel on.

Lone surrogates, which JSON escapes can spell but no encoding can carry, become U+FFFD; NaN and Infinity, which are no
JSON, are refused; so are bytes that are not UTF-8 and nesting that no honest request has.
"""

import collections
import functools
import json
import re
from typing import Any

from penstock.errors import InvalidRequestError

_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_FOUR_BYTES = re.compile(rb"[\xf0-\xff]")
_MAX_DEPTH = 64
_MAX_KEYS = 4096
"""Far more than any request has, and few enough that each may be told to be unknown."""
_MARKS = b',:[{"'
_NO_MARKS = bytes(byte for byte in range(256) if byte not in _MARKS)
_BYTES_OF_MARK = 128
"""The most that values take for each comma, colon or opening bracket among them: objects of one key that are all alike
take 100, short texts 80, empty lists 40."""
_FEW_MARKS = 2**10
_MANY_QUOTES = 2**19
"""So many cost too much to tell texts from what is around them; then all counts as if it were around them."""


class MalformedJsonError(InvalidRequestError):
    """A body that is no JSON."""


def parse_json(data: bytes, *, unique_keys: bool = False, numbers_as_text: bool = False) -> Any:
    """The value that `data` holds.

    Args:
        data: JSON, in UTF-8.
        unique_keys: Refuse an object that has a key twice, or thousands of them; else the last of a key holds.
        numbers_as_text: Numbers come as they were written, as `str`.

    Raises:
        MalformedJsonError: it is no JSON, or holds NaN or Infinity, or is nested too deeply, or an object is refused.
    """
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=str if numbers_as_text else None,
            parse_int=str if numbers_as_text else _integer,
            object_pairs_hook=_unique if unique_keys else None,
        )
        if _ESCAPED_SURROGATE.search(data):
            value = _mended(value, 0)
    except UnicodeDecodeError as error:
        raise MalformedJsonError(f"the body is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from None
    except json.JSONDecodeError as error:
        raise MalformedJsonError(f"the body is no JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise MalformedJsonError("the body is nested too deeply") from None
    return value


def memory_of(data: bytes) -> int:
    """The most memory, in bytes, that `data` takes when it is read by `parse_json` and answered, found without reading.

    That is itself and a copy, its text as a whole and in parts, and what there is around each value.
    """
    width = 1 if data.isascii() and b"\\u" not in data else 2
    if width == 2 and (_FOUR_BYTES.search(data) or _ESCAPED_SURROGATE.search(data)):
        width = 4
    return (2 + 2 * width) * len(data) + _BYTES_OF_MARK * _num_marks(data)


def _num_marks(data: bytes) -> int:
    """How many commas, colons and opening brackets there are outside texts; where they are few, in them too."""
    num_marks = sum(map(data.count, (b",", b":", b"[", b"{")))
    if num_marks <= _FEW_MARKS:
        return num_marks
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = unescaped.translate(None, _NO_MARKS)
    if marks.count(b'"') > _MANY_QUOTES:
        return len(marks)
    return sum(map(len, marks.split(b'"')[::2]))


def _refuse_constant(name: str) -> Any:
    raise MalformedJsonError(f"the body holds {name}, which is no JSON number; send a finite one, or leave it out")


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 20 else float(digits)


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


def printable(text: str) -> str:
    """The text with U+FFFD for each lone surrogate."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)
