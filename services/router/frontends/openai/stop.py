"""Finds stop strings in text while it is generated. Pure.

Invariant: no character of a found stop string was emitted before, because text that may become one is held back.
"""

from collections.abc import Sequence

from penstock.model.chat.marks import held_back


class StopFinder:
    """Cuts one answer where the first of its stop strings begins."""

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        """Look for `stops`, none of them empty; `includes_stop`: emit the found stop string, too."""
        self._stops = stops
        self._includes_stop = includes_stop
        self._held = ""
        self.stop: str | None = None
        """The found stop string, after which nothing is emitted."""

    @property
    def found(self) -> bool:
        """Whether a stop string was found."""
        return self.stop is not None

    def add(self, text: str) -> str:
        """Take more text; return what can be emitted."""
        if self.found or not self._stops:
            return "" if self.found else text
        self._held += text
        starts = [(start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if starts:
            start, self.stop = min(starts)
            end = start + len(self.stop) if self._includes_stop else start
            emitted, self._held = self._held[:end], ""
            return emitted
        num_held = max(held_back(self._held, stop) for stop in self._stops)
        emitted, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        return emitted

    def finish(self) -> str:
        """Return the text that was held back; nothing follows."""
        emitted, self._held = self._held, ""
        return emitted
