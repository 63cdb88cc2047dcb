"""Arithmetic over a small grammar: exact where numbers are rational and short, rounded elsewhere, and bounded.

Invariant: Python never runs any part of an expression. It is parsed to a tree, in which only numbers, the operators,
and the names below are accepted; sizes are checked before anything large is computed.
"""

import ast
import math
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Final, TypeAlias

from services.rollout.worker.environments.trigonometry import AngleUnit, Trigonometry

Number: TypeAlias = Fraction | float
"""Exact, or rounded where it is irrational or too long."""

_MAX_CHARACTERS: Final = 500
_MAX_BITS: Final = 1000
"""Maximum bits of an exact numerator or denominator: about 300 digits, the range of floats."""
_NO_DECIMALS_FROM: Final = 2**53
"""Rounded numbers from here on are integers, with figures missing at their end."""
_ERROR: Final = 1e-12
_ERROR_ULPS: Final = 8
"""Maximum error of a rounded number after a few operations: absolute, or in units of its last place if that is more."""
_LITERAL = re.compile(r"[0-9]{0,300}(\.[0-9]{0,300})?([eE][+-]?[0-9]{1,3})?")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "π": "pi", "√": "sqrt"})
_TOO_SMALL: Final = "a number in it is too small"
_CONSTANTS: Final = {"pi": math.pi, "e": math.e}


class ArithmeticRefusal(Exception):  # noqa: N818 - not an error of ours: what is wrong with an expression
    """An expression has no value here; the text says why."""


def evaluate(expression: str, angle_unit: AngleUnit | None = None) -> Number:
    """Return the value of an expression; `^` is a power, like `**`.

    Args:
        expression: Numbers, + - * / // % ** and the functions below.
        angle_unit: The unit of all angles in it; needed only by trigonometric functions.

    Raises:
        ArithmeticRefusal: it cannot be read, has no real value, or one that floats cannot hold.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ArithmeticRefusal(f"it has {len(expression)} characters; at most {_MAX_CHARACTERS} are read")
    source = expression.translate(_SIGNS).replace("^", "**").strip()
    try:
        tree = ast.parse(source, mode="eval")
        return _Evaluation(source, angle_unit).value(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ArithmeticRefusal(f"it cannot be computed: {reason or 'it is nested too deeply'}") from None
    except ZeroDivisionError:
        raise ArithmeticRefusal("it divides by zero") from None
    except OverflowError:
        raise ArithmeticRefusal("a number in it is too large") from None


def _sqrt(value: Number) -> Number:
    return _power(value, Fraction(1, 2))


def _cbrt(value: Number) -> Number:
    return -_power(-value, Fraction(1, 3)) if value < 0 else _power(value, Fraction(1, 3))


def _log(value: Number, base: Number = 10.0) -> Number:
    if value <= 0 or base <= 0 or base == 1:
        raise ValueError("a logarithm needs a number above 0, and a base above 0 that is not 1")
    return math.log10(value) if base == 10 else math.log(value) / math.log(base)


def _ln(value: Number) -> Number:
    return _log(value, math.e)


def _round(value: Number, places: Number = Fraction(0)) -> Number:
    if places != int(places) or not 0 <= places <= 100:
        raise ValueError("round takes from 0 to 100 decimal places")
    return value if _lacks_figures(value) else Fraction(value).__round__(int(places))


def _floor(value: Number) -> Number:
    return _floor_divide(value, Fraction(1))


def _ceil(value: Number) -> Number:
    return -_floor(-value)


def _floor_divide(value: Number, divisor: Number) -> Number:
    quotient = value / divisor
    return quotient if _lacks_figures(quotient) else Fraction(math.floor(_settled(value, divisor)))


def _modulo(value: Number, divisor: Number) -> Number:
    if _lacks_figures(value / divisor):
        raise ValueError("the remainder of a rounded number of more than 15 figures is not known")
    quotient = _settled(value, divisor)
    return Fraction(0) if quotient == math.floor(quotient) else value % divisor


def _settled(value: Number, divisor: Number) -> Number:
    """Return value / divisor; the next integer if the remainder is an error of rounding, as of sqrt(3)^2 / 3."""
    quotient = value / divisor
    if isinstance(quotient, Fraction):
        return quotient
    integer = round(quotient)
    error = max(_ERROR, _ERROR_ULPS * math.ulp(float(value)))
    return Fraction(integer) if abs(value - integer * divisor) <= error else quotient


def _lacks_figures(value: Number) -> bool:
    """Return whether it is rounded and so large that not even its integer part is known."""
    return isinstance(value, float) and abs(value) >= _NO_DECIMALS_FROM


_FUNCTIONS: Final[dict[str, tuple[Callable[..., Number], int, int]]] = {
    "sqrt": (_sqrt, 1, 1),
    "cbrt": (_cbrt, 1, 1),
    "abs": (abs, 1, 1),
    "round": (_round, 1, 2),
    "floor": (_floor, 1, 1),
    "ceil": (_ceil, 1, 1),
    "min": (min, 2, 20),
    "max": (max, 2, 20),
    "exp": (math.exp, 1, 1),
    "ln": (_ln, 1, 1),
    "log": (_log, 1, 2),
}
"""Each function with its minimum and maximum number of arguments."""

_OPERATORS: Final[dict[type[ast.operator], Callable[[Number, Number], Number]]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: _floor_divide,
    ast.Mod: _modulo,
    ast.Pow: lambda base, exponent: _power(base, exponent),
}


class _Evaluation:
    """Evaluates one expression."""

    def __init__(self, source: str, angle_unit: AngleUnit | None) -> None:
        self._source = source
        self._angle_unit = angle_unit

    def value(self, node: ast.expr) -> Number:
        """Return the value of a part."""
        match node:
            case ast.Constant():
                return self._literal(node)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.value(operand)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                return _bounded(_OPERATORS[type(operator)](self.value(left), self.value(right)))
            case ast.Name(id=name) if name in _CONSTANTS:
                return _CONSTANTS[name]
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                return _bounded(self._call(name, [self.value(argument) for argument in arguments]))
        part = ast.get_source_segment(self._source, node) or self._source
        raise ArithmeticRefusal(
            f"{part[:60]!r} cannot be computed: only numbers, + - * / // % **, pi, e and the functions "
            f"{', '.join((*_FUNCTIONS, *Trigonometry.NAMES))} can; write a product with *"
        )

    def _literal(self, node: ast.Constant) -> Number:
        text = (ast.get_source_segment(self._source, node) or "").replace("_", "")
        if not _LITERAL.fullmatch(text):
            raise ArithmeticRefusal(f"{text[:60]!r} is no decimal number, or has too many digits")
        return _bounded(Fraction(text))

    def _call(self, name: str, arguments: list[Number]) -> Number:
        if name in Trigonometry.NAMES:
            least = most = Trigonometry.NAMES[name]
        elif name in _FUNCTIONS:
            _, least, most = _FUNCTIONS[name]
        else:
            raise ArithmeticRefusal(
                f"there is no function {name[:60]!r}; there are {', '.join((*_FUNCTIONS, *Trigonometry.NAMES))}"
            )
        if not least <= len(arguments) <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            raise ArithmeticRefusal(f"{name} takes {wanted} numbers, not {len(arguments)}")
        if name in _FUNCTIONS:
            return _FUNCTIONS[name][0](*arguments)
        if self._angle_unit is None:
            raise ArithmeticRefusal(
                f'{name} needs to know the unit of angles: add "angle_unit": "degrees" or "radians"'
            )
        if name in ("sin", "cos", "tan") and _lacks_figures(arguments[0]):
            raise ValueError(f"the {name} of a rounded number of more than 15 figures is not known")
        return Trigonometry(self._angle_unit).compute(name, arguments)


def _power(base: Number, exponent: Number) -> Number:
    """Return the power, exact if base, exponent and result are rational and the result is short."""
    if base == 0 and exponent < 0:
        raise ZeroDivisionError
    if base < 0 and exponent != int(exponent):
        raise ValueError("a root of a negative number is not real; cbrt takes negative numbers")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if base in (0, 1):
            return base if exponent else Fraction(1)
        if base == -1:
            return Fraction(-1 if exponent.numerator % 2 else 1)
        root = _exact_root(base, exponent.denominator)
        size = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent)
        if root is not None and size <= 2 * _MAX_BITS:
            return Fraction(root**exponent.numerator)
        power = _rounded_power(base, exponent)
    else:
        power = float(float(base) ** float(exponent))
    if power == 0 and base != 0:
        raise ArithmeticRefusal(_TOO_SMALL)
    return power


def _rounded_power(base: Fraction, exponent: Fraction) -> float:
    """Return the power of a rational number other than 0, correct to 12 figures.

    A large power multiplies the error of a rounded base, and only bases near 1 have large powers that floats can hold.
    So for these, the distance of the base from 1 is rounded, not the base.
    """
    sign = -1 if base < 0 and exponent.numerator % 2 else 1
    size = abs(base)
    if Fraction(1, 2) < size < 2:
        return sign * math.exp(float(exponent) * math.log1p(float(size - 1)))
    return sign * float(float(size) ** float(exponent))


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    """Return the rational root of that degree; None if there is none, or if the degree is too large to try."""
    if degree == 1:
        return value
    if degree > _MAX_BITS:
        return None
    root = Fraction(_integer_root(value.numerator, degree), _integer_root(value.denominator, degree))
    return root if root**degree == value else None


def _integer_root(value: int, degree: int) -> int:
    """Return the largest integer whose power is at most `value`, by bisection."""
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**degree <= value else (low, middle)
    return low


def _bounded(value: Number) -> Number:
    """Return the value, rounded if it is exact and too long."""
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) <= _MAX_BITS:
            return value
        value = float(value)
        if value == 0:
            raise ArithmeticRefusal(_TOO_SMALL)
    if 0 < abs(value) < sys.float_info.min:  # such floats have fewer figures
        raise ArithmeticRefusal(_TOO_SMALL)
    if not math.isfinite(value):
        raise OverflowError
    return value
