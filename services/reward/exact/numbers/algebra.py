r"""Exact arithmetic on sums of rational multiples of square roots and symbols.

A value is a sum of terms c * sqrt(r) * s1^k1 * s2^k2 ..., with c rational, r a square-free integer (negative for
imaginary ones) and symbols s: the numbers pi and e, or variables. Different keys are linearly independent, so two
values are equal exactly when their terms are. Values outside this form, such as a cube root, become a `Decimal` of
`PRECISION` digits if they are real numbers, and are refused if they have variables. Every operation is bounded.
"""

import decimal
import math
from decimal import Decimal
from fractions import Fraction

from services.reward.exact.numbers.integers import integer_root, square_free

Rational = int | Fraction
Monomial = tuple[tuple[str, int], ...]
"""Symbols with their nonzero powers, in alphabetical order."""
Terms = dict[tuple[int, Monomial], Rational]
"""Nonzero coefficients by radicand and symbols."""
Value = Terms | Decimal

MAX_EXPONENT = 64
MAX_BITS = 8192
MAX_TERMS = 32
PRECISION = 100
EQUAL_DIGITS = 75
"""Reals without an exact form are equal if they agree in this many digits."""

ONE: tuple[int, Monomial] = (1, ())
"""The key of rational numbers."""
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798")
E = Decimal("2.71828182845904523536028747135266249775724709369995957496696762772407663035354759457138217852516642743")
CONSTANTS = {"\\pi": PI, "e": E}

CONTEXT = decimal.Context(prec=PRECISION, Emax=10**6, Emin=-(10**6))

_MAX_LOGARITHM = 2000


class TooLargeError(ArithmeticError):
    """A number in the text is beyond the bounds of computation."""


class NoValueError(ValueError):
    """The text is not in the grammar, or its value has no such form."""


def constant(value: Rational) -> Terms:
    """Return the rational `value`."""
    return {ONE: value} if value else {}


def symbol(name: str) -> Terms:
    """Return a variable, or one of the constants."""
    return {(-1, ()): 1} if name == "i" else {(1, ((name, 1),)): 1}


def as_rational(value: Value) -> Rational | None:
    """Return `value` if it is rational, else None."""
    if isinstance(value, Decimal) or len(value) > 1:
        return None
    return value.get(ONE) if value else 0


def has_variables(value: Value) -> bool:
    """Return whether any symbol is a variable rather than a number."""
    return not isinstance(value, Decimal) and any(name not in CONSTANTS for _, names in value for name, _ in names)


def is_real(value: Value) -> bool:
    """Return whether it is a real number."""
    return isinstance(value, Decimal) or (not has_variables(value) and all(radicand > 0 for radicand, _ in value))


def add(left: Value, right: Value) -> Value:
    """Return left + right."""
    if isinstance(left, Decimal) or isinstance(right, Decimal):
        return add_reals(to_decimal(left), to_decimal(right))
    terms = dict(left)
    for key, coefficient in right.items():
        _add_term(terms, key, coefficient)
    return _bounded(terms)


def add_reals(left: Decimal, right: Decimal) -> Decimal:
    r"""Return left + right; 0 if they agree in `EQUAL_DIGITS` digits and cancel.

    Raises:
        TooLargeError: the smaller one would be lost, so that 1 + e^{-1000} would be 1.
    """
    if not left or not right:
        return left or right
    sizes = (left.adjusted(), right.adjusted())
    if max(sizes) - min(sizes) >= EQUAL_DIGITS:
        raise TooLargeError(f"a sum of numbers that differ in size by more than {EQUAL_DIGITS} digits")
    total = CONTEXT.add(left, right)
    return total if total.adjusted() > max(sizes) - EQUAL_DIGITS else Decimal(0)


def negate(value: Value) -> Value:
    """Return -value."""
    if isinstance(value, Decimal):
        return CONTEXT.minus(value)
    return {key: -coefficient for key, coefficient in value.items()}


def multiply(left: Value, right: Value) -> Value:
    """Return left * right."""
    if isinstance(left, Decimal) or isinstance(right, Decimal):
        return _finite(CONTEXT.multiply(to_decimal(left), to_decimal(right)))
    terms: Terms = {}
    for (radicand, names), coefficient in left.items():
        for (other, other_names), factor in right.items():
            product = coefficient * factor
            if radicand == 1 or other == 1:
                root = radicand * other
            else:
                common = math.gcd(radicand, other)
                root = (radicand // common) * (other // common)
                product *= -common if radicand < 0 and other < 0 else common
            key = (root, _merge(names, other_names))
            _add_term(terms, key, product)
    return _bounded(terms)


def divide(left: Value, right: Value) -> Value:
    """Return left / right.

    Raises:
        ZeroDivisionError: right is zero.
        NoValueError: there are variables in a denominator of several terms.
    """
    if isinstance(left, Decimal) or isinstance(right, Decimal):
        divisor = to_decimal(right)
        if not divisor:
            raise ZeroDivisionError
        return _finite(CONTEXT.divide(to_decimal(left), divisor))
    for _ in range(3):
        if len(right) <= 1:
            return multiply(left, _inverse(right))
        (key, coefficient), *others = right.items()  # the conjugate rids the denominator of a root
        conjugate: Terms = dict(others)
        conjugate[key] = -coefficient
        product = multiply(right, conjugate)
        assert isinstance(product, dict)
        if len(right) > 2 or len(product) > 1:
            break
        widened = multiply(left, conjugate)
        assert isinstance(widened, dict)
        left, right = widened, product
    if left == right:
        return constant(1)
    return _finite(CONTEXT.divide(to_decimal(left), to_decimal(right)))


def power(base: Value, exponent: Value) -> Value:
    """Return base ** exponent.

    Raises:
        TooLargeError: the exponent or the result is beyond the bounds.
        ZeroDivisionError: zero has a negative exponent.
        NoValueError: it has no value in the form.
    """
    rational = as_rational(exponent)
    if rational is None:
        if has_variables(exponent) or has_variables(base):
            raise NoValueError
        return _real_power(to_decimal(base), to_decimal(exponent))
    if not -MAX_EXPONENT <= rational <= MAX_EXPONENT:
        raise TooLargeError(f"an exponent of more than {MAX_EXPONENT}")
    if rational.denominator == 1:
        return _integer_power(base, int(rational))
    return root(_integer_power(base, rational.numerator), rational.denominator)


def root(value: Value, degree: int) -> Value:
    """Return the principal root of `value`.

    Raises:
        TooLargeError, NoValueError: as for `power`.
    """
    if not 2 <= degree <= MAX_EXPONENT:
        raise NoValueError
    rational = as_rational(value)
    if rational is not None:
        exact = _rational_root(rational, degree)
        if exact is not None:
            return exact
    real = to_decimal(value)
    if real < 0:
        if degree % 2 == 0:
            raise NoValueError
        return CONTEXT.minus(_real_power(CONTEXT.minus(real), CONTEXT.divide(Decimal(1), Decimal(degree))))
    if degree == 2:
        return CONTEXT.sqrt(real)
    return _real_power(real, CONTEXT.divide(Decimal(1), Decimal(degree))) if real else real


def surd(factor: Rational, radicand: int) -> Value:
    """Return factor * sqrt(radicand) for a nonnegative radicand."""
    split = square_free(radicand) if factor and radicand else (0, 1)
    if split is None:
        return multiply(constant(factor), root(constant(radicand), 2))
    outer, rest = split
    product = factor * outer
    if not product:
        return {}
    return _bounded({(rest, ()): product.numerator if product.denominator == 1 else product})


def to_decimal(value: Value) -> Decimal:
    """Return a real number to `PRECISION` digits.

    Raises:
        NoValueError: it is not real.
        TooLargeError: its terms differ too much in size, or cancel.
    """
    if isinstance(value, Decimal):
        return value
    total = Decimal(0)
    for (radicand, names), coefficient in value.items():
        if radicand < 0:
            raise NoValueError
        term = CONTEXT.divide(Decimal(coefficient.numerator), Decimal(coefficient.denominator))
        if radicand != 1:
            term = CONTEXT.multiply(term, CONTEXT.sqrt(Decimal(radicand)))
        for name, exponent in names:
            if name not in CONSTANTS:
                raise NoValueError
            term = CONTEXT.multiply(term, CONTEXT.power(CONSTANTS[name], exponent))
        total = add_reals(total, term)
    if value and not total:
        raise TooLargeError(f"terms that cancel in {EQUAL_DIGITS} digits")
    return total


def are_equal(left: Value, right: Value) -> bool:
    """Return whether the values are equal: exactly, or in `EQUAL_DIGITS` digits if one is a `Decimal`; only 0 is 0."""
    if not isinstance(left, Decimal) and not isinstance(right, Decimal):
        return left == right
    if not (is_real(left) and is_real(right)):
        return False
    one, other = to_decimal(left), to_decimal(right)
    scale = max(abs(one), abs(other))
    return abs(CONTEXT.subtract(one, other)) <= CONTEXT.multiply(scale, Decimal(10) ** -EQUAL_DIGITS)


def is_near(left: Value, right: Value, distance: Rational) -> bool:
    """Return whether |left - right| <= distance; exact for rationals."""
    one, other = as_rational(left), as_rational(right)
    if one is not None and other is not None:
        return -distance <= one - other <= distance
    if not (is_real(left) and is_real(right)):
        return False
    limit = CONTEXT.divide(Decimal(distance.numerator), Decimal(distance.denominator))
    return abs(CONTEXT.subtract(to_decimal(left), to_decimal(right))) <= limit


def _merge(left: Monomial, right: Monomial) -> Monomial:
    if not left or not right:
        return left or right
    powers = dict(left)
    for name, exponent in right:
        powers[name] = powers.get(name, 0) + exponent
        if abs(powers[name]) > MAX_EXPONENT:
            raise TooLargeError(f"an exponent of more than {MAX_EXPONENT}")
    return tuple(sorted((name, exponent) for name, exponent in powers.items() if exponent))


def _inverse(value: Terms) -> Terms:
    for (radicand, names), coefficient in value.items():  # 1 / (c sqrt(r)) = sqrt(r) / (c r)
        inverse = Fraction(1) / (coefficient * radicand)
        key = (radicand, tuple((name, -exponent) for name, exponent in names))
        return {key: inverse.numerator if inverse.denominator == 1 else inverse}
    raise ZeroDivisionError


def _integer_power(base: Value, exponent: int) -> Value:
    if exponent < 0:
        return divide(constant(1), _integer_power(base, -exponent))
    if isinstance(base, Decimal):
        return _finite(CONTEXT.power(base, exponent))
    result: Value = constant(1)
    square: Value = base
    while exponent:
        if exponent & 1:
            result = multiply(result, square)
        exponent >>= 1
        if exponent:
            square = multiply(square, square)
    return result


def _real_power(base: Decimal, exponent: Decimal) -> Decimal:
    if base <= 0:
        raise NoValueError
    if abs(CONTEXT.multiply(CONTEXT.ln(base), exponent)) > _MAX_LOGARITHM:
        raise TooLargeError("a power that is too large")
    return CONTEXT.power(base, exponent)


def _rational_root(value: Rational, degree: int) -> Terms | None:
    if not value:
        return {}
    if degree == 2:
        split = square_free(abs(value.numerator * value.denominator))
        if split is None:
            return None
        outer, radicand = split
        quotient = Fraction(outer, value.denominator)
        coefficient: Rational = quotient.numerator if quotient.denominator == 1 else quotient
        return {(radicand if value > 0 else -radicand, ()): coefficient}
    if value < 0 and degree % 2 == 0:
        raise NoValueError
    numerator = integer_root(abs(value.numerator), degree)
    denominator = integer_root(value.denominator, degree)
    if numerator is None or denominator is None:
        return None
    return constant(Fraction(numerator if value > 0 else -numerator, denominator))


def _add_term(terms: Terms, key: tuple[int, Monomial], coefficient: Rational) -> None:
    total = terms.get(key, 0) + coefficient
    if total:
        terms[key] = total
    else:
        del terms[key]


def _bounded(terms: Terms) -> Terms:
    if len(terms) > MAX_TERMS:
        raise TooLargeError(f"a sum of more than {MAX_TERMS} terms")
    for (radicand, _), coefficient in terms.items():
        if (
            coefficient.numerator.bit_length() > MAX_BITS
            or coefficient.denominator.bit_length() > MAX_BITS
            or radicand.bit_length() > MAX_BITS
        ):
            raise TooLargeError(f"a value of more than {MAX_BITS} bits")
    return terms


def _finite(value: Decimal) -> Decimal:
    if abs(value.adjusted()) > MAX_BITS:
        raise TooLargeError("a value that is too large")
    return value
