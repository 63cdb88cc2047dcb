r"""Compares two numbers with their units: exactly, and with the tolerances of the rules.

Percentages: `50\%` is 50 and 0.5; 50 is not 0.5. Units of one dimension are converted; if one side has none, the
other's is ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from services.reward.exact.nodes import Scalar
from services.reward.exact.numbers.algebra import (
    Value,
    are_equal,
    as_rational,
    constant,
    divide,
    has_variables,
    is_near,
    is_real,
    multiply,
    symbol,
)
from services.reward.exact.numbers.number import Number
from services.reward.exact.numbers.units import DEGREE, PERCENT, Unit, find_unit

_MIN_LABEL = 100
"""Integers of at least this absolute value are taken for rounded labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules for answers that are right without having the same value."""

    tolerance: Fraction = Fraction(0)
    """Largest right |answer - gold| for a gold answer that is a rounded label."""
    decimal_figures: int = 4
    """A gold answer in exact form accepts its decimal, rounded to at least this many significant figures; 0: never."""


def same_scalars(gold: Scalar, answer: Scalar, rules: Rules) -> bool:
    """Return whether the answer has the value of the gold answer."""
    ours, theirs = gold.number, answer.number
    if theirs.is_unfinished:
        return False
    if has_variables(ours.value):
        return are_equal(ours.value, theirs.value)
    if has_variables(theirs.value):
        measured = _measured(gold, answer)
        return measured is not None and same_scalars(gold, measured, rules)
    scales = _scales(gold.unit, answer.unit)
    if scales is None:
        return False
    if answer.unit == DEGREE and gold.unit is None and _is_part_of_turn(ours.value):
        scales = (*scales, multiply(constant(Fraction(1, 180)), symbol("\\pi")))
    is_label = ours.places is not None and (ours.places > 0 or _is_large(ours.value))
    has_tolerance = rules.tolerance > 0 and is_label and (gold.unit == PERCENT) == (answer.unit == PERCENT)
    for scale in scales:
        given = theirs.value if scale is None else multiply(theirs.value, scale)
        if not theirs.is_truncated and are_equal(ours.value, given):
            return True
        if has_tolerance and is_near(ours.value, given, rules.tolerance):
            return True
        if ours.places is None and rules.decimal_figures and theirs.places and theirs.figures >= rules.decimal_figures:
            step = Fraction(1, 10**theirs.places if theirs.is_truncated else 2 * 10**theirs.places)
            factor = Fraction(1) if scale is None else as_rational(scale)
            if factor is not None and is_near(ours.value, given, step * factor):
                return True
    return False


def _measured(gold: Scalar, answer: Scalar) -> Scalar | None:
    """Read `5m` as five metres if the gold answer is a length; otherwise m may be a variable."""
    value = answer.number.value
    if gold.unit is None or answer.unit is not None or isinstance(value, Decimal):
        return None
    letters = {names for _, names in value}
    if len(letters) != 1:
        return None
    ((letter, exponent), *others) = letters.pop()
    unit = find_unit(letter)
    if others or exponent != 1 or unit is None or unit.dimension != gold.unit.dimension:
        return None
    plain: Value = {(radicand, ()): coefficient for (radicand, _), coefficient in value.items()}
    return Scalar(text=answer.text, number=Number(plain, is_unfinished=answer.number.is_unfinished), unit=unit)


def _is_part_of_turn(value: Value) -> bool:
    """Return whether it is a fraction of pi, as angles in radians are."""
    return not isinstance(value, Decimal) and [names for _, names in value] == [(("\\pi", 1),)]


def _is_large(value: Value) -> bool:
    """Return whether an integer is of the size of rounded labels."""
    number = as_rational(value)
    return number is not None and not -_MIN_LABEL < number < _MIN_LABEL


def _scales(gold: Unit | None, answer: Unit | None) -> Sequence[Value | None] | None:
    """Return the factors that may convert the answer to the gold's unit; None if its dimension is another."""
    if gold is answer or (gold == answer):
        return (None,)
    if gold == PERCENT or answer == PERCENT:
        if gold is None:
            return (None, constant(Fraction(1, 100)))
        return (None, constant(100)) if answer is None else None
    if gold is None or answer is None:
        return (None,)
    if gold.dimension != answer.dimension:
        if _is_vague(gold) or _is_vague(answer):
            return (None,)
        return None
    scale: Value = constant(answer.size / gold.size)
    if answer.has_pi and not gold.has_pi:
        scale = multiply(scale, symbol("\\pi"))
    elif gold.has_pi and not answer.has_pi:
        scale = divide(scale, symbol("\\pi"))
    return (scale,)


def _is_vague(unit: Unit) -> bool:
    """Return whether the unit is `units`, which says no more than a missing unit."""
    return all(quantity == "units" for quantity, _ in unit.dimension)


def is_rounded(exact: Scalar, rounded: Scalar) -> bool:
    """Return whether the exact number rounds to the plain decimal."""
    number = rounded.number
    if number.places is None or not (is_real(exact.number.value) and is_real(number.value)):
        return False
    return is_near(exact.number.value, number.value, Fraction(1, 2 * 10**number.places))
