"""Elementary functions of real numbers: exact where the value is well known, else to `PRECISION` digits."""

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

from services.reward.exact.numbers.algebra import (
    CONTEXT,
    EQUAL_DIGITS,
    ONE,
    PI,
    PRECISION,
    NoValueError,
    Terms,
    TooLargeError,
    Value,
    add_reals,
    as_rational,
    constant,
    divide,
    negate,
    symbol,
    to_decimal,
)

_MAX_ARGUMENT = 10**6
_MAX_FACTORIAL = 100
_MAX_BINOMIAL = 400

# sin of 0, 15, ... 90 degrees.
_SINES: tuple[Terms, ...] = (
    {},
    {(6, ()): Fraction(1, 4), (2, ()): Fraction(-1, 4)},
    {ONE: Fraction(1, 2)},
    {(2, ()): Fraction(1, 2)},
    {(3, ()): Fraction(1, 2)},
    {(6, ()): Fraction(1, 4), (2, ()): Fraction(1, 4)},
    {ONE: 1},
)


def sine(angle: Value) -> Value:
    """Return the sine of `angle` in radians."""
    turns = None if isinstance(angle, Decimal) else as_rational(divide(angle, symbol("\\pi")))
    if turns is not None and (12 * turns).denominator == 1:
        steps = int(12 * turns) % 24
        quadrant = steps % 12
        found = _SINES[min(quadrant, 12 - quadrant)]
        return negate(found) if steps >= 12 else found
    return _sine(to_decimal(angle))


def cosine(angle: Value) -> Value:
    """Return the cosine of `angle` in radians."""
    quarter: Terms = {(1, (("\\pi", 1),)): Fraction(1, 2)}
    if isinstance(angle, Decimal):
        return _sine(add_reals(angle, CONTEXT.divide(PI, Decimal(2))))
    turned = dict(angle)
    for key, coefficient in quarter.items():
        turned[key] = turned.get(key, 0) + coefficient
    return sine({key: coefficient for key, coefficient in turned.items() if coefficient})


def logarithm(value: Value, base: Value | None = None) -> Value:
    """Return the logarithm of `value`, natural unless there is a `base`; rational ones are exact."""
    number, of = as_rational(value), None if base is None else as_rational(base)
    if number is not None and of is not None and of > 1 and number > 0:
        reached: int | Fraction = 1
        for exponent in range(65):
            if reached == number or reached * number == 1:
                return constant(exponent if reached == number else -exponent)
            reached *= of
    real = to_decimal(value)
    if real <= 0:
        raise NoValueError
    if base is None:
        found = CONTEXT.ln(real)
        return found if found and found.adjusted() > -EQUAL_DIGITS else constant(0)
    divisor = to_decimal(base)
    if divisor <= 0 or divisor == 1:
        raise NoValueError
    return CONTEXT.divide(CONTEXT.ln(real), CONTEXT.ln(divisor))


def factorial(value: Value) -> Terms:
    """Return n! of a small n."""
    number = as_rational(value)
    if number is None or number.denominator != 1 or number < 0:
        raise NoValueError
    if number > _MAX_FACTORIAL:
        raise TooLargeError(f"the factorial of more than {_MAX_FACTORIAL}")
    return constant(math.factorial(int(number)))


def binomial(upper: Value, lower: Value) -> Terms:
    """Return the binomial coefficient of small numbers."""
    top, bottom = as_rational(upper), as_rational(lower)
    if top is None or bottom is None or top.denominator != 1 or bottom.denominator != 1 or bottom < 0 or top < 0:
        raise NoValueError
    if top > _MAX_BINOMIAL:
        raise TooLargeError(f"a binomial coefficient of more than {_MAX_BINOMIAL}")
    return constant(math.comb(int(top), int(bottom)))


def absolute(value: Value) -> Value:
    """Return |value| of a real number."""
    return negate(value) if to_decimal(value) < 0 else value


FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    "\\sin": sine,
    "\\cos": cosine,
    "\\tan": lambda angle: divide(sine(angle), cosine(angle)),
    "\\cot": lambda angle: divide(cosine(angle), sine(angle)),
    "\\sec": lambda angle: divide(constant(1), cosine(angle)),
    "\\csc": lambda angle: divide(constant(1), sine(angle)),
    "\\ln": logarithm,
    "\\lg": lambda value: logarithm(value, constant(10)),
    "\\log": lambda value: logarithm(value, constant(10)),
}
"""Functions of one argument, by command."""


def _small(angle: Decimal) -> Decimal:
    """Return the angle between -pi and pi with the same sine."""
    if abs(angle) > _MAX_ARGUMENT:
        raise TooLargeError("an angle that is too large")
    turn = CONTEXT.multiply(PI, Decimal(2))
    return CONTEXT.remainder_near(angle, turn)


def _sine(real: Decimal) -> Decimal:
    """Return the sine; 0 if `real` and a multiple of pi agree in `EQUAL_DIGITS` digits."""
    angle = _small(real)
    square = CONTEXT.multiply(angle, angle)
    term = total = angle
    for index in range(2, 200, 2):
        term = CONTEXT.divide(CONTEXT.multiply(CONTEXT.minus(term), square), Decimal(index * (index + 1)))
        total = CONTEXT.add(total, term)
        if not term or term.adjusted() < -PRECISION - 10:
            break
    return total if total.adjusted() > real.adjusted() - EQUAL_DIGITS else Decimal(0)
