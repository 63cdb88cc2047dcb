"""Text with brackets: where a bracket closes, and splitting outside brackets. Every function is linear."""

import re
from collections.abc import Iterator

_LONE = re.compile(r"([_^])\{(\w)\}(?!\d)")
_SPACES = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])|(?<=[A-Za-z]) (?=[0-9])")


def squeeze(text: str) -> str:
    """Remove spaces, except where they separate words and numbers, and braces around single characters."""
    if " " in text:
        text = _SPACES.sub("", text)
    return _LONE.sub(r"\1\2", text) if "{" in text else text


def split(text: str, separator: re.Pattern[str]) -> list[tuple[str, str]]:
    """Return the parts of `text` between separators outside of brackets, each with the separator before it."""
    cuts = list(_outside(text, separator))
    parts: list[tuple[str, str]] = []
    start, sign = 0, ""
    for cut in cuts:
        parts.append((text[start : cut.start()].strip(), sign))
        start, sign = cut.end(), cut[0]
    parts.append((text[start:].strip(), sign))
    return parts


def _outside(text: str, separator: re.Pattern[str]) -> Iterator[re.Match[str]]:
    depth = position = 0
    for cut in separator.finditer(text):
        depth += _rise(text, position, cut.start())
        position = cut.start()
        if depth == 0 and "\\" not in text[cut.start() - 1 : cut.start()]:
            yield cut


def _rise(text: str, start: int, end: int) -> int:
    count = text.count
    return (
        count("(", start, end) + count("[", start, end) + count("{", start, end)
        - count(")", start, end) - count("]", start, end) - count("}", start, end)
    )  # fmt: skip


def closes(text: str, start: int = 0) -> int:
    """Return where the bracket that opens at `start` closes; -1 if it does not."""
    depth = 0
    for position in range(start, len(text)):
        char = text[position]
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return position
    return -1
