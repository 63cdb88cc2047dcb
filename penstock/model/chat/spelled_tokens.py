"""Replaces text that spells special tokens in a chat template's input, and finds it again in the output. Pure.

A mark of private-use characters stands for the replaced text. Text that holds these characters is replaced as well.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

_OPEN, _CLOSE = "\ue000", "\ue001"
ASSISTANT = "\ue002"
"""Stands for an assistant's text, which no other text can spell."""
_TAKEN_OUT = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


class SpelledTokens:
    """Finds the special tokens of one tokenizer in text."""

    def __init__(self, special: Collection[str]) -> None:
        """Find the tokens `special`."""
        alternatives = [re.escape(token) for token in sorted(special, key=lambda token: (-len(token), token))]
        self._spelled = re.compile("|".join([*alternatives, f"[{_OPEN}{_CLOSE}{ASSISTANT}]"]))

    def take_out(self, taken_out: list[str], text: str) -> str:
        """Return the text with a mark in place of each spelt special token, which is appended to `taken_out`."""

        def mark(match: re.Match[str]) -> str:
            taken_out.append(match[0])
            return f"{_OPEN}{len(taken_out) - 1}{_CLOSE}"

        return self._spelled.sub(mark, text)


def pieces(rendered: str, taken_out: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a text with marks, in order, each with whether it was taken out."""
    for index, piece in enumerate(_TAKEN_OUT.split(rendered)):
        yield (piece, False) if index % 2 == 0 else (taken_out[int(piece)], True)


def in_each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return the JSON value with `change` applied to every string in it, keys included."""
    match value:
        case str():
            return change(value)
        case list():
            return [in_each_text(each, change) for each in value]
        case dict():
            return {change(key): in_each_text(each, change) for key, each in value.items()}
    return value
