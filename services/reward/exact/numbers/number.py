r"""Numbers and polynomials as people write them, read to exact values without sympy, floats or `eval`.

The commonest forms are read at once, all others by the grammar. The spelling of a number is kept, because it decides
which other values are right.
"""

import decimal
import re
from dataclasses import dataclass
from fractions import Fraction

from services.reward.exact.numbers.algebra import (
    NoValueError,
    Rational,
    TooLargeError,
    Value,
    as_rational,
    constant,
    surd,
)
from services.reward.exact.numbers.grammar import MAX_DIGITS, parse

_LITERAL = re.compile(r"(?P<sign>[-+]?) *(?P<whole>\d*)(?:\.(?P<part>\d*))?(?P<dots> ?\.\.\.| ?\\l?dots)?", re.ASCII)
_COMMON = re.compile(  # reads most answers at once
    r"(?P<sign>-?) *(?:\\frac ?\{ ?(?P<upper>\d{1,18}) ?\} ?\{ ?(?P<lower>[1-9]\d{0,17}) ?\}"
    r"|(?P<fraction>\\frac ?\{ ?)?(?P<factor>\d{1,18})? ?\\sqrt ?\{ ?(?P<radicand>\d{1,18}) ?\}"
    r"(?(fraction) ?\} ?\{ ?(?P<divisor>[1-9]\d{0,17}) ?\}))",
    re.ASCII,
)
_MIN_REPEATED = 3


@dataclass(frozen=True, slots=True)
class Number:
    """A value and its spelling."""

    value: Value
    places: int | None = None
    """Digits after the point of a plain decimal; 0 for a plain integer; None for any other form."""
    figures: int = 0
    """Significant figures of a plain decimal or integer."""
    is_truncated: bool = False
    """Whether it is a plain decimal followed by an ellipsis."""
    is_unfinished: bool = False
    """Whether it is a rational number with an uncomputed sum or difference of rationals: work, not an answer."""


def read_number(text: str) -> Number | None:
    """Return the value of `text`, or None if it is not in the grammar.

    Raises:
        TooLargeError: digits, an exponent, the nesting or the work are beyond the bounds.
    """
    literal = _LITERAL.fullmatch(text)
    if literal is not None:
        return _literal(literal)
    if not text.isascii():
        return None
    common = read_common(text)
    if common is not None:
        return common
    try:
        value, is_unfinished = parse(text)
    except (NoValueError, ZeroDivisionError, decimal.DecimalException):
        return None
    return Number(value, is_unfinished=is_unfinished)


def parse_rational(text: str) -> Fraction | None:
    """Return the value of `text` if it is a rational number in the grammar, else None.

    Raises:
        TooLargeError: as `read_number`.
    """
    number = read_number(text)
    value = None if number is None else as_rational(number.value)
    return None if value is None else Fraction(value)


def _literal(match: re.Match[str]) -> Number | None:
    whole, part = match["whole"], match["part"] or ""
    if not whole and not part:
        return None
    digits = whole + part
    if len(digits) > MAX_DIGITS:
        raise TooLargeError(f"a number of more than {MAX_DIGITS} digits")
    value: Rational = int(digits)
    if match["sign"] == "-":
        value = -value
    if part:
        value = Fraction(value, 10 ** len(part))
    dots = match["dots"] is not None
    if dots and len(part) >= _MIN_REPEATED and len(set(part[-_MIN_REPEATED:])) == 1:  # 0.333... is a third
        last = Fraction(int(part[-1]), 9 * 10 ** len(part))
        return Number(constant(value - last if match["sign"] == "-" else value + last))
    return Number(constant(value), places=len(part), figures=len(digits.lstrip("0")), is_truncated=dots)


def read_common(text: str) -> Number | None:
    """Return the value of a fraction of integers, or a rational multiple of a square root of one."""
    match = _COMMON.fullmatch(text)
    if match is None:
        return None
    sign, upper, lower, fraction, factor, radicand, divisor = match.groups()
    if upper:
        ratio = Fraction(int(upper), int(lower))
        return Number(constant(-ratio if sign else ratio))
    multiple: Rational = int(factor or 1)
    if fraction:
        multiple = Fraction(multiple, int(divisor))
    return Number(surd(-multiple if sign else multiple, int(radicand)))
