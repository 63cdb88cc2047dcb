"""Which kept groups come first where not all fit. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

Entry = Mapping[str, Any]


def _mean_reward(entry: Entry) -> float | None:
    rewards = [reward for reward in entry["rewards"] if reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


_WANTED: Final[Sequence[Callable[[Entry], float | None]]] = (
    lambda entry: entry["step"],
    lambda entry: entry["dlogp_max"],
    lambda entry: None if (reward := _mean_reward(entry)) is None else -reward,
    _mean_reward,
    lambda entry: entry["step"] if entry["outcome"] == "evaluated" else None,
    lambda entry: entry["step"] if entry["outcome"] in ("stale", "failed", "filtered") else None,
)
"""What people look for, each as a number that is highest for what they want most: the newest, the largest difference
between trainer and engine, the worst, the best, the last evaluation, and what was left out. None: it is not wanted."""


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
