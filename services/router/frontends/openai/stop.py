"""Stop strings, found in text while it comes. Pure.

Invariant: no character of a stop string that is found was told before, so what may become one is held back.
"""

from collections.abc import Sequence


class StopFinder:
    """Cuts one answer where the first of its stop strings begins."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for `stops`, none of them empty."""
        self._stops = stops
        self._held = ""
        self.found = False
        """Whether one was found: nothing is told from then on."""

    def add(self, text: str) -> str:
        """Take more text; return what can be told."""
        if self.found or not self._stops:
            return "" if self.found else text
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            told, self._held = self._held[: min(places)], ""
            return told
        num_held = max(held_back(self._held, stop) for stop in self._stops)
        told, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        return told

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        told, self._held = self._held, ""
        return told


def held_back(text: str, word: str) -> int:
    """How many characters at the end of `text` may be the beginning of `word`."""
    longest = min(len(text), len(word) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(word[:count])), 0)
