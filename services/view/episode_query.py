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


def _judged(entry: Entry) -> list[float]:
    """Return the rewards of a group's samples that have one."""
    return [reward for reward in entry["rewards"] if reward is not None]


def mean_reward(entry: Entry) -> float | None:
    """Return the mean reward of a group; None if no sample has a reward."""
    rewards = _judged(entry)
    return sum(rewards) / len(rewards) if rewards else None


def lowest_reward(entry: Entry) -> tuple[float, float] | None:
    """Return the reward of a group's worst sample and then the mean, which decides between groups whose worst samples
    are equally bad; None if no sample has a reward."""
    rewards = _judged(entry)
    return (min(rewards), sum(rewards) / len(rewards)) if rewards else None


_ORDERS: Final[Mapping[str, Callable[[Entry], Any]]] = {
    "step": lambda entry: entry["step"],
    "index": lambda entry: entry["index"],
    "reward": mean_reward,
    "lowest": lowest_reward,
    "spread": lambda entry: max(rewards) - min(rewards) if (rewards := _judged(entry)) else None,
    "tokens": lambda entry: max(entry["num_tokens"], default=0),
    "turns": lambda entry: max(entry["num_turns"], default=0),
    "dlogp": lambda entry: entry["dlogp_max"],
    "lag": lambda entry: entry["version"] - entry["versions"][0] if entry["versions"] else None,
}
"""What groups can be sorted by: a number, or several of which the first that differs decides; None comes last."""


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
        known = sorted(((key, place) for key, place in keyed if key is not None), reverse=self.descending)
        places = [place for _, place in known] + [place for key, place in keyed if key is None]
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
