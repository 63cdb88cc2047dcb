"""Equations of polynomials: equal if one is a multiple of the other."""

from services.reward.exact.nodes import Equation, Named, Scalar
from services.reward.exact.numbers.algebra import (
    NoValueError,
    Terms,
    TooLargeError,
    Value,
    add,
    multiply,
    negate,
)
from services.reward.exact.numbers.number import read_number


def same_equation(one: Named | Equation, other: Named | Equation) -> bool | None:
    """Return whether the equations are proportional, so that they have the same solutions; None if not polynomial."""
    left, right = _difference(one), _difference(other)
    if left is None or right is None:
        return None
    try:
        return _are_proportional(left, right)
    except (TooLargeError, NoValueError):
        return None


def _difference(side: Named | Equation) -> Terms | None:
    """Return left - right as a polynomial, multiplied by any denominator."""
    found: Value | None
    if isinstance(side, Equation):
        found = side.difference
    else:
        name = read_number(side.name)
        if name is None or not isinstance(side.body, Scalar) or side.body.unit is not None:
            return None
        found = add(name.value, negate(side.body.number.value))
    if not isinstance(found, dict) or not found:
        return None
    lowest: dict[str, int] = {}
    for _, names in found:
        for symbol, exponent in names:
            lowest[symbol] = min(lowest.get(symbol, 0), exponent)
    common = tuple((symbol, -exponent) for symbol, exponent in sorted(lowest.items()) if exponent)
    cleared = multiply(found, {(1, common): 1})
    return cleared if isinstance(cleared, dict) else None


def _are_proportional(left: Terms, right: Terms) -> bool:
    leading = max(left, key=lambda key: (key[1], key[0]))
    partner = [key for key in right if key[1] == leading[1]]
    if not partner:
        return False
    ours: Terms = {key: value for key, value in left.items() if key[1] == leading[1]}
    theirs: Terms = {key: right[key] for key in partner}
    coefficient: Terms = {(radicand, ()): value for (radicand, _), value in ours.items()}
    factor: Terms = {(radicand, ()): value for (radicand, _), value in theirs.items()}
    return multiply(left, factor) == multiply(right, coefficient)
