"""Stop strings, found in text while it is generated. Pure.

Invariant: no character of a stop string that is found was emitted before, so text that may become one is held back.
"""

from collections.abc import Sequence

from penstock.model.marks import held_back


class StopFinder:
    """Cuts one answer where the first of its stop strings begins."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for `stops`, none of them empty."""
        self._stops = stops
        self._held = ""
        self.found = False
        """Whether one was found: nothing is emitted from then on."""

    def add(self, text: str) -> str:
        """Take more text; return what can be emitted."""
        if self.found or not self._stops:
            return "" if self.found else text
        self._held += text
        starts = [start for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if starts:
            self.found = True
            emitted, self._held = self._held[: min(starts)], ""
            return emitted
        num_held = max(held_back(self._held, stop) for stop in self._stops)
        emitted, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        return emitted

    def finish(self) -> str:
        """Return what was held back; nothing follows."""
        emitted, self._held = self._held, ""
        return emitted
