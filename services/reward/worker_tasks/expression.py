r"""Plain algebra in LaTeX as a tree, and the values of trees at given points.

Plain algebra has one way to write and read it: numbers, variables, the four operations, powers, roots, fractions,
absolute values and the usual functions. Ambiguous text (`1/2x`, `\sin x / 2`, `f(x)`, `2 3`) and anything beyond it
(sums, integrals, factorials, words) is not read here. A tree is a tuple: an operation, then its arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import mpmath

Tree = tuple[Any, ...]

DIGITS = 120
"""Significant digits of a value."""
CONTEXT = mpmath.MPContext()
CONTEXT.dps = DIGITS
AGREE_DIGITS = 70
"""Values that agree in this many digits are equal."""
AGREE = CONTEXT.mpf(10) ** -AGREE_DIGITS
_MAX_LOGARITHM = 10**5
_MAX_TANH = 60


def _tanh(value: Any) -> Any:
    if abs(CONTEXT.re(value)) > _MAX_TANH:
        raise ArithmeticError("it has the same digits as 1")
    return CONTEXT.tanh(value)


def _with_zeros(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    r"""Return the function with 0 where its value is one of rounding: `\sin\pi` is 1e-121 otherwise."""

    def evaluated(argument: Any) -> Any:
        value = function(argument)
        return CONTEXT.zero if argument and abs(value) < AGREE * abs(argument) else value

    return evaluated


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sin": _with_zeros(CONTEXT.sin),
    "cos": _with_zeros(CONTEXT.cos),
    "tan": _with_zeros(CONTEXT.tan),
    "cot": _with_zeros(CONTEXT.cot),
    "sec": CONTEXT.sec,
    "csc": CONTEXT.csc,
    "arcsin": CONTEXT.asin,
    "arccos": CONTEXT.acos,
    "arctan": CONTEXT.atan,
    "sinh": CONTEXT.sinh,
    "cosh": CONTEXT.cosh,
    "tanh": _tanh,
    "ln": _with_zeros(CONTEXT.ln),
    "abs": abs,
}
CONSTANTS: dict[str, Any] = {"pi": CONTEXT.pi, "e": CONTEXT.e, "i": CONTEXT.j}


class UndefinedError(ArithmeticError):
    """The expression has no finite value at the point, or none that can be computed."""


def number(value: int | Fraction) -> Tree:
    """Return the rational `value`."""
    return ("number", Fraction(value))


def negative(tree: Tree) -> Tree:
    """Return -tree."""
    return ("multiply", number(-1), tree)


def difference(left: Tree, right: Tree) -> Tree:
    """Return left - right."""
    return ("add", left, negative(right))


def quotient(left: Tree, right: Tree) -> Tree:
    """Return left / right."""
    return ("multiply", left, ("power", right, number(-1)))


def symbols_of(tree: Tree) -> frozenset[str]:
    """Return the names of its variables."""
    if tree[0] == "symbol":
        return frozenset((tree[1],))
    return frozenset().union(*(symbols_of(part) for part in tree[1:] if isinstance(part, tuple)))


def evaluate(tree: Tree, point: Mapping[str, Any]) -> Any:
    """Return its complex value to about `DIGITS` digits, with the variables' values from `point`.

    Raises:
        UndefinedError: it has none.
    """
    try:
        value = CONTEXT.convert(_evaluate(tree, point))
    except (ArithmeticError, ValueError) as error:
        raise UndefinedError(str(error)) from None
    if not CONTEXT.isfinite(value):
        raise UndefinedError("not finite")
    return value


def _evaluate(tree: Tree, point: Mapping[str, Any]) -> Any:
    match tree:
        case ("number", value):
            return CONTEXT.mpf(value.numerator) / value.denominator
        case ("symbol", name):
            return point[name]
        case ("constant", name):
            return CONSTANTS[name]
        case ("add", *terms):
            return _sum([_evaluate(term, point) for term in terms])
        case ("multiply", *factors):
            product = CONTEXT.one
            for factor in factors:
                product = product * _evaluate(factor, point)
            return product
        case ("power", base, exponent):
            return _power(_evaluate(base, point), exponent, point)
        case ("root", radicand, index):
            return _root(_evaluate(radicand, point), _evaluate(index, point))
        case ("log", argument, base):
            return CONTEXT.log(_evaluate(argument, point), _evaluate(base, point))
        case (name, argument):
            return FUNCTIONS[name](_evaluate(argument, point))
    raise UndefinedError(f"{tree[0]} is not an operation")


def _sum(terms: Sequence[Any]) -> Any:
    r"""Return the sum; 0 if the terms cancel. Beside x, e^{-1000} would be lost: that sum is undefined."""
    largest = max(map(abs, terms))
    if any(term and abs(term) < AGREE * largest for term in terms):
        raise UndefinedError(f"a term is lost in the first {AGREE_DIGITS} digits of another")
    total = sum(terms, CONTEXT.zero)
    return total if abs(total) > AGREE * largest else CONTEXT.zero


def _power(base: Any, exponent: Tree, point: Mapping[str, Any]) -> Any:
    value = _evaluate(exponent, point)
    if base == 0:
        if CONTEXT.re(value) <= 0:
            raise UndefinedError("zero to a power that is not positive")
        return CONTEXT.zero
    if abs(value * CONTEXT.ln(abs(base))) > _MAX_LOGARITHM:
        raise UndefinedError("the power is too large")
    if exponent[0] == "number" and exponent[1].denominator == 1:
        return base ** int(exponent[1])
    return CONTEXT.power(base, value)


def _root(radicand: Any, index: Any) -> Any:
    """Return the real root if there is one."""
    is_odd = CONTEXT.isint(index) and int(CONTEXT.re(index)) % 2 == 1
    if is_odd and not CONTEXT.im(radicand) and CONTEXT.re(radicand) < 0:
        return -CONTEXT.root(-CONTEXT.re(radicand), int(CONTEXT.re(index)))
    if index == 2:
        return CONTEXT.sqrt(radicand)
    return CONTEXT.power(radicand, 1 / index) if radicand else CONTEXT.zero
