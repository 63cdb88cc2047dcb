r"""Checks whether a response has the format that a pattern demands.

Responses are hostile and Python's `re` backtracks: `<think>.*</think>.*\\boxed\{.*\}.*` already takes time that grows
with the fourth power of a response made for it. So patterns of only literals and `.*`, which are most patterns, are
searched here in linear time; any other goes to a worker process, under the item's deadline.
"""

import re

from services.reward.exact.text.end_of_text import drop_end_of_text
from services.reward.isolation.tasks import FormatTask, sendable

_PART = re.compile(r"\.\*\??|\\(?P<escaped>[^A-Za-z0-9])|(?P<plain>[^\\.^$*+?{}\[\]|()])|(?P<other>.)", re.DOTALL)


class Format:
    """A pattern that the whole of a response must match; `.` matches line ends too."""

    def __init__(self, pattern: str, *, max_chars: int, drops_end_of_text: bool = False) -> None:
        """Read `pattern`.

        Args:
            pattern: A regular expression.
            max_chars: What a worker sees of a longer response, half from its start, half from its end.
            drops_end_of_text: Whether end-of-text tokens and white space at its end are no part of the response.
        """
        self._pattern = pattern
        self._max_chars = max_chars
        self._drops_end_of_text = drops_end_of_text
        self._literals = _split_at_wildcards(pattern)

    def check(self, response: str) -> bool | FormatTask:
        """Return whether `response` has the format, or the task that finds out."""
        if self._drops_end_of_text:
            response = drop_end_of_text(response)
        if self._literals is not None:
            return _is_sequence(response, self._literals)
        if len(response) > self._max_chars:
            half = self._max_chars // 2
            response = response[:half] + response[-half:]
        return FormatTask(pattern=self._pattern, text=sendable(response))


def _split_at_wildcards(pattern: str) -> list[str] | None:
    """Return the literals between the pattern's `.*`; None if it has other parts."""
    literals = [""]
    for part in _PART.finditer(pattern):
        if part["other"]:
            return None
        if part["escaped"] or part["plain"]:
            literals[-1] += part["escaped"] or part["plain"]
        else:
            literals.append("")
    return literals


def _is_sequence(text: str, literals: list[str]) -> bool:
    """Return whether `text` is these literals in order, with any text between them. Each matches at its first place."""
    first, *rest = literals
    if not rest:
        return text == first
    *middle, last = rest
    if not text.startswith(first):
        return False
    position = len(first)
    for literal in middle:
        position = text.find(literal, position)
        if position < 0:
            return False
        position += len(literal)
    return len(text) - len(last) >= position and text.endswith(last)
