"""Reads and writes lines of JSON: one object each, checked field by field.

A fault is a `ValueError` that names the field, the value and the remedy; the caller adds the file and the line.
"""

import json
import os
from typing import Any

from penstock.runtime.text import printable

MAX_LINE_BYTES = 16 * 2**20
"""A line with more bytes is not read."""


def read_object(text: bytes | None, *, is_first: bool, example: str) -> dict[str, Any]:
    """Return the fields of a line; None is a line longer than `MAX_LINE_BYTES`, `example` shows a valid line in errors.

    Raises:
        ValueError: it is not a JSON object.
    """
    if text is None:
        raise ValueError(f"the line is longer than {MAX_LINE_BYTES} bytes; shorten the response")
    if is_first:
        text = text.removeprefix(b"\xef\xbb\xbf")
    try:
        fields = json.loads(text.decode(errors="surrogatepass"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start} is {text[error.start]:#04x}; convert the file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}; write one JSON object per line") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON that can be read: {error}; write one JSON object per line") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{shown(fields)} is not a JSON object; write {example}")
    return fields


def read_id(fields: dict[str, Any]) -> str | int:
    """Return the line's own id.

    Raises:
        ValueError: it has none, or one of another type.
    """
    if "id" not in fields:
        raise ValueError('field "id" is missing; give each line one, a string or an integer')
    value = fields["id"]
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError(f'field "id" = {shown(value)} is neither a string nor an integer; write it as a string')
    return value


def read_text(fields: dict[str, Any], key: str, *, default: str | None = None) -> str:
    """Return a string; without a default it is required.

    Raises:
        ValueError: it is missing, or not a string.
    """
    value = fields.get(key, default)
    if value is None and key not in fields:
        raise ValueError(f'field "{key}" is missing; give the text')
    if not isinstance(value, str):
        raise ValueError(f'field "{key}" = {shown(value)} is not a string; write it as one')
    return printable(value)


def read_golds(fields: dict[str, Any], key: str) -> list[str]:
    """Return the gold answers: a string or a list of strings; empty if the field is missing.

    Raises:
        ValueError: it is neither.
    """
    value = fields.get(key, [])
    golds = [value] if isinstance(value, str) else value
    if not isinstance(golds, list) or not all(isinstance(gold, str) for gold in golds):
        raise ValueError(f'field "{key}" = {shown(value)} is neither a string nor a list of strings; quote the answer')
    return [printable(gold) for gold in golds]


def shown(value: object) -> str:
    """Return a value as errors show it."""
    try:
        text = json.dumps(value)
    except RecursionError:  # it was parsed with fewer calls on the stack
        return "what is nested too deeply"
    return text if len(text) <= 60 else f"{text[:57]}..."


def encode(fields: dict[str, Any]) -> bytes:
    """Return the fields as a line."""
    try:
        return f"{json.dumps(fields, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:  # an id with a lone surrogate, which needs an escape
        return f"{json.dumps(fields)}\n".encode()


def write_all(descriptor: int, content: bytes) -> None:
    """Write bytes to an open file, without a buffer: one would keep them after an error, and fail again at its end.

    Raises:
        OSError: not all of them can be written.
    """
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
