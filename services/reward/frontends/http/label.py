"""What trainers send as the label of a sample: a text, a number or a list of them."""

import json
import reprlib
from collections.abc import Sequence
from typing import Any

from penstock.errors import InvalidRequestError


def golds_of(label: Any, *, field: str) -> Sequence[str]:
    """The gold answers that a label holds; none for null. Numbers must come as text, as they were written.

    Raises:
        InvalidRequestError: it is nothing of the kind.
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
    """A prompt as text: a chat is its JSON."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
