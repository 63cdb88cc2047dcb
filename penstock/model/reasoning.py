"""Separates a policy's thoughts from its answer: the text before `</think>`, at once or while it is generated. Pure.

A chat template may open `<think>` itself, in the generation prompt (`Renderer.opens_thinking`); the answer then has
only the closing mark. Otherwise an answer has thoughts if it begins with `<think>`. If the thinking is never closed,
everything is thought.

Invariants: nothing is lost except the marks and the white space around them. The time is linear in the text.
"""

import dataclasses

from penstock.model.marks import SpaceHolder, held_back

OPEN, CLOSE = "<think>", "</think>"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A piece of an answer."""

    reasoning: str = ""
    content: str = ""


class ReasoningReader:
    """Reads one answer."""

    def __init__(self, *, is_open: bool) -> None:
        """Start with no text.

        Args:
            is_open: Whether the generation prompt has opened `<think>`.
        """
        self._is_open = is_open
        """Whether the thinking is still open."""
        self._is_at_start = True
        """Whether the answer may still begin with `<think>`."""
        self._tail = ""
        """Text that may become a mark."""
        self._start: list[str] = []
        """White space before the first character."""
        self._thought = SpaceHolder(is_after_mark=True)
        self._has_closed = False
        """Whether only white space has followed the closing mark."""

    def add(self, text: str) -> Spoken:
        """Add text; return the part that is final."""
        text, self._tail = self._tail + text, ""
        if self._is_at_start and not (text := self._begin(text)):
            return Spoken()
        if not self._is_open:
            return Spoken(content=self._say(text))
        thought, mark, said = text.partition(CLOSE)
        if not mark:
            end = len(text) - held_back(text, CLOSE)
            self._tail = text[end:]
            return Spoken(reasoning=self._thought.add(text[:end]))
        self._is_open, self._has_closed = False, True
        return Spoken(reasoning=self._thought.add(thought), content=self._say(said))

    def finish(self) -> Spoken:
        """Return the held-back text; nothing follows."""
        rest, self._tail = self._tail, ""
        if self._is_open:
            return Spoken(reasoning=self._thought.add(rest))
        start, self._start = "".join(self._start), []
        return Spoken(content=start + rest)

    def _begin(self, text: str) -> str:
        """Consume white space and `<think>` at the start; return the text after them, or "" while it is uncertain."""
        begun = text.lstrip()
        self._start.append(text[: len(text) - len(begun)])
        if OPEN.startswith(begun) and begun != OPEN:
            self._tail = begun
            return ""
        self._is_at_start = False
        start, self._start = "".join(self._start), []
        if begun.startswith(OPEN):
            self._is_open = True
            return begun[len(OPEN) :]
        return begun if self._is_open else start + begun

    def _say(self, text: str) -> str:
        if self._has_closed:
            text = text.lstrip()
            self._has_closed = not text
        return text
