"""Which rank computes which row, and when. Pure.

Ranks compute in rounds: in each, every rank computes one row, and all wait for each other, because they hold shares of
the weights. So rows of about equal cost belong in one round. If rows are dealt out from the costliest on, the longest
rows of all rounds together take the least time.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

PlanT = TypeVar("PlanT", bound=Sequence[Any])

_WIDENING = 1.1


class Round(NamedTuple):
    """A rank's work in one round."""

    row: int
    """Number of the row."""
    counts: bool
    """Whether this rank is the one that the row is given to. Otherwise there were fewer rows than ranks, and it
    computes another rank's row for nothing."""


def rounds_of(rank: int, costs: Sequence[float], num_ranks: int) -> list[Round]:
    """Return the rounds of a rank; all ranks have equally many.

    Args:
        rank: Its number.
        costs: Of each row, in any unit.
        num_ranks: A rank alone computes the rows in their order.
    """
    if num_ranks == 1:
        return [Round(row, counts=True) for row in range(len(costs))]
    dealt = dealt_rows(costs)
    rounds = []
    for first in range(0, len(dealt), num_ranks):
        rows = dealt[first : first + num_ranks]
        rounds.append(Round(rows[min(rank, len(rows) - 1)], counts=rank < len(rows)))
    return rounds


def dealt_rows(costs: Sequence[float]) -> list[int]:
    """Return the numbers of rows in the order in which several ranks are dealt them, one after the other."""
    return sorted(range(len(costs)), key=lambda row: (-costs[row], row))


def evened(num_ranks: int, plan: Callable[[int], PlanT], widest: PlanT, *, num_tokens: int, max_tokens: int) -> PlanT:
    """Return a plan that gives all ranks about as much to do, in no more rounds than the `widest` rows need.

    Args:
        num_ranks: Who computes them.
        plan: Makes rows of at most the given number of tokens.
        widest: What it makes of `max_tokens`.
        num_tokens: Of all rows together.
        max_tokens: Of a row.
    """
    num_rows = -(-len(widest) // num_ranks) * num_ranks
    tokens = -(-num_tokens // num_rows) if num_rows else max_tokens
    while tokens < max_tokens:
        rows = plan(tokens)
        if len(rows) <= num_rows:
            return rows
        tokens = int(tokens * _WIDENING) + 1
    return widest
