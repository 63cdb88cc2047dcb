"""Reads the label that a trainer sends with a sample: a string, a number or a list of these."""

import json
import reprlib
from collections.abc import Sequence
from typing import Any

from penstock.errors import InvalidRequestError


def golds_of(label: Any, *, field: str) -> Sequence[str]:
    """Return the gold answers in a label; none for null. Numbers must arrive as text, as they were written.

    Raises:
        InvalidRequestError: the label has another type.
    """
    match label:
        case None:
            return ()
        case str():
            return (label,)
        case list() if all(isinstance(each, str) for each in label):
            return tuple(label)
    raise InvalidRequestError(f"{field} = {reprlib.repr(label)}: a label is a string, a number or a list of strings")


def text_of(value: Any) -> str:
    """Return a prompt as text: a chat as its JSON."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
