"""Separates a policy's thoughts from its answer: the text before `</think>`, at once or while it is generated. Pure.

A chat template may open `<think>` itself, in the generation prompt (`Renderer.opens_thinking`); the answer then has
only the closing mark. Otherwise an answer has thoughts if it begins with `<think>`. If the thinking is never closed,
everything is thought.

Invariants: nothing is lost, for a `ReasoningReader` except the marks and the white space around them. The time is
linear in the text.
"""

import dataclasses

from penstock.model.chat.marks import SpaceHolder, held_back

OPEN, CLOSE = "<think>", "</think>"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A piece of an answer."""

    reasoning: str = ""
    content: str = ""


class ThoughtSplitter:
    """Splits one answer behind its thoughts: `reasoning` and `content` together are the text, marks included."""

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

    def add(self, text: str) -> Spoken:
        """Add text; return the part that is final."""
        text, self._tail = self._tail + text, ""
        if self._is_at_start:
            text = self._begin(text)
        if not (self._is_open and text):
            return Spoken(content=text)
        thought, mark, said = text.partition(CLOSE)
        if not mark:
            end = len(text) - held_back(text, CLOSE)
            self._tail = text[end:]
            return Spoken(reasoning=text[:end])
        self._is_open = False
        return Spoken(reasoning=thought + mark, content=said)

    def finish(self) -> Spoken:
        """Return the held-back text; nothing follows."""
        rest, self._start, self._tail = "".join([*self._start, self._tail]), [], ""
        return Spoken(reasoning=rest) if self._is_open else Spoken(content=rest)

    def _begin(self, text: str) -> str:
        """Return the answer's text, or "" while it is uncertain whether it begins with `<think>`."""
        begun = text.lstrip()
        self._start.append(text[: len(text) - len(begun)])
        if OPEN.startswith(begun) and begun != OPEN:
            self._tail = begun
            return ""
        start, self._start = "".join(self._start), []
        self._is_at_start, self._is_open = False, self._is_open or begun.startswith(OPEN)
        return start + begun


class ReasoningReader:
    """Reads one answer, without its marks."""

    def __init__(self, *, is_open: bool) -> None:
        """Start with no text; `is_open`: whether the generation prompt has opened `<think>`."""
        self._splitter = ThoughtSplitter(is_open=is_open)
        self._thought = SpaceHolder(is_after_mark=True)
        self._has_thought = False
        self._has_closed = False
        """Whether only white space has followed the closing mark."""

    def add(self, text: str) -> Spoken:
        """Add text; return the part that is final."""
        return self._bare(self._splitter.add(text))

    def finish(self) -> Spoken:
        """Return the held-back text; nothing follows."""
        return self._bare(self._splitter.finish())

    def _bare(self, spoken: Spoken) -> Spoken:
        return Spoken(reasoning=self._think(spoken.reasoning), content=self._say(spoken.content))

    def _think(self, text: str) -> str:
        """Return a piece of the thoughts; marks are never cut into pieces."""
        if not text:
            return ""
        if not self._has_thought:
            self._has_thought = True
            text = text.lstrip().removeprefix(OPEN)
        self._has_closed = text.endswith(CLOSE)
        return self._thought.add(text.removesuffix(CLOSE))

    def _say(self, text: str) -> str:
        if self._has_closed:
            text = text.lstrip()
            self._has_closed = not text
        return text
