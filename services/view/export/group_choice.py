"""Which kept groups come first where not all fit. Pure."""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Final

from services.view.episode_query import Entry, lowest_reward, mean_reward


def _badness(entry: Entry) -> tuple[float, ...] | None:
    rewards = lowest_reward(entry)
    return None if rewards is None else tuple(-each for each in rewards)


_WANTED: Final[Sequence[Callable[[Entry], Any]]] = (
    lambda entry: entry["step"],
    lambda entry: entry["dlogp_max"],
    _badness,
    mean_reward,
    lambda entry: entry["step"] if entry["outcome"] == "evaluated" else None,
    lambda entry: entry["step"] if entry["outcome"] in ("stale", "failed", "filtered") else None,
)
"""What people look for, each as a value that is highest for what they want most: the newest, the largest difference
between trainer and engine, the worst sample, the best group, the last evaluation, and what was left out. None: it is
not wanted."""


def order_of_groups(index: Sequence[Entry]) -> Iterator[int]:
    """Yield the places of all groups in the index: in turn the one that is wanted most for each reason."""
    orders = []
    for wanted in _WANTED:
        places = [(value, place) for place, entry in enumerate(index) if (value := wanted(entry)) is not None]
        orders.append([place for _, place in sorted(places, reverse=True)])
    seen: set[int] = set()
    for turn in zip_longest(*orders):
        for place in turn:
            if place is not None and place not in seen:
                seen.add(place)
                yield place
