"""Filters and sorts the index of kept groups. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.errors import InvalidRequestError

Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was found."""

    places: list[int]
    """In the index, in order."""
    num_unsearched: int = 0
    """Groups whose texts were not searched, because it would have taken too long."""


Search = Callable[[Sequence[Entry], Sequence[int], Sequence[str]], Found]
"""Returns those of the places in the index whose groups have all of the words, casefolded."""


def _reward(entry: Entry) -> float:
    rewards = [reward for reward in entry["rewards"] if reward is not None]
    return sum(rewards) / len(rewards) if rewards else float("nan")


def _spread(entry: Entry) -> float:
    rewards = [reward for reward in entry["rewards"] if reward is not None]
    return max(rewards) - min(rewards) if rewards else float("nan")


_ORDERS: Final[Mapping[str, Callable[[Entry], float]]] = {
    "step": lambda entry: entry["step"],
    "index": lambda entry: entry["index"],
    "reward": _reward,
    "spread": _spread,
    "tokens": lambda entry: max(entry["num_tokens"], default=0),
    "turns": lambda entry: max(entry["num_turns"], default=0),
    "dlogp": lambda entry: float("nan") if entry["dlogp_max"] is None else entry["dlogp_max"],
    "lag": lambda entry: entry["version"] - entry["versions"][0] if entry["versions"] else float("nan"),
}
"""Numbers by which groups can be sorted; NaN comes last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeQuery:
    """What to list."""

    outcome: str = ""
    """trained, stale, filtered, failed or evaluated; empty: all."""
    step: int | None = None
    """Only this step's groups."""
    row: str = ""
    """Only groups of this row of the data, `<source>/<row>`: the same prompt over versions."""
    finish: str = ""
    """Only groups with a sample that ended so."""
    text: str = ""
    """Only groups with these words in prompt, gold answer or samples, or in the reason why they were kept."""
    sort: str = "step"
    descending: bool = True

    def run(self, index: Sequence[Entry], search: Search) -> Found:
        """Return the places of the entries that match, in order; `search` is only asked where there are words.

        Raises:
            InvalidRequestError: groups cannot be sorted so.
        """
        if self.sort not in _ORDERS:
            raise InvalidRequestError(f"sort = {self.sort!r} must be one of {', '.join(_ORDERS)}")
        found = [place for place, entry in enumerate(index) if self._matches(entry)]
        value = _ORDERS[self.sort]
        keyed = [(value(index[place]), place) for place in found]
        known = sorted((each for each in keyed if each[0] == each[0]), reverse=self.descending)
        places = [place for _, place in known] + [place for key, place in keyed if key != key]
        words = self.text.casefold().split()
        return search(index, places, words) if words else Found(places=places)

    def _matches(self, entry: Entry) -> bool:
        if self.outcome and entry["outcome"] != self.outcome:
            return False
        if self.step is not None and entry["step"] != self.step:
            return False
        if self.row and f"{entry['source']}/{entry['row']}" != self.row:
            return False
        return not self.finish or self.finish in entry["finish"]
