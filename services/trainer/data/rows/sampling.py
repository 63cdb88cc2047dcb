"""Reads a row's own sampling: a struct of those parameters that differ from the recipe's."""

import math
from collections.abc import Mapping
from typing import Any, Final

_WANTED: Final = {
    "max_new_tokens": "an integer of at least 1",
    "temperature": "a number from 0 to 100",
    "top_p": "a number above 0 and at most 1",
    "top_k": "an integer of at least 1, or -1 for no limit",
}


def read_sampling(value: Any, column: str, *, is_evaluated: bool) -> dict[str, float]:
    """Return the parameters that a row sets; null fields are left out, because a column of structs has one type.

    Args:
        value: The row's value; None sets nothing.
        column: Its column, for errors.
        is_evaluated: Whether rows may set more than `max_new_tokens`: only training needs equal sampling.

    Raises:
        ValueError: it is no struct, or has a parameter that a row may not set, or a value out of range.
    """
    given = {} if value is None else value
    if not isinstance(given, Mapping):
        raise ValueError(f"column {column!r} holds {str(given)[:80]}; want a struct such as {{max_new_tokens: 64}}")
    wanted = {str(key): number for key, number in given.items() if number is not None}
    if not is_evaluated and wanted.keys() - {"max_new_tokens"}:
        raise ValueError(
            f"column {column!r} holds {str(wanted)[:80]}; a row may have its own max_new_tokens, and the trainer "
            "computes log-probabilities for the run's temperature, top_p and top_k"
        )
    for key, number in wanted.items():
        if key not in _WANTED:
            raise ValueError(f"column {column!r} holds {key[:80]!r}; a row may have its own {', '.join(_WANTED)}")
        if not _is_in_range(key, number):
            raise ValueError(f"column {column!r} holds {key} = {str(number)[:80]}; want {_WANTED[key]}")
    return wanted


def _is_in_range(key: str, number: Any) -> bool:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    if key == "temperature":
        return bool(0 <= number <= 100)
    if key == "top_p":
        return bool(0 < number <= 1)
    if not math.isfinite(number) or number != int(number):
        return False
    return number >= 1 or (key == "top_k" and number == -1)
