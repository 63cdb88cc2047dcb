r"""Plain numbers as exact rationals, without sympy and without floats.

The grammar is small and bounded: integers, decimals, `1.5e3`, `\frac{a}{b}`, `a/b`, mixed numbers `7\frac{3}{4}`,
products written with a sign, powers with an integer exponent, signs and brackets. What it does not know, it does not
guess at.
"""

import re
from fractions import Fraction

MAX_DEPTH = 24
MAX_DIGITS = 400
MAX_EXPONENT = 64
MAX_BITS = 8192

_TOKEN = re.compile(
    r" *(?P<token>\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+|\\frac(?= *\d)|\\(?:frac|times|cdot|div)(?![A-Za-z])|[-+*/^(){}])",
    re.ASCII,
)
_DECIMAL = re.compile(r"[-+]? *\d*\.\d+", re.ASCII)


class TooLargeError(ArithmeticError):
    """A number in the text is beyond the bounds of what is computed."""


class _NoNumberError(ValueError):
    """The text is not in the grammar."""


def parse_rational(text: str) -> Fraction | None:
    """Return the value of `text`, or None if it is not in the grammar.

    Raises:
        TooLargeError: digits, an exponent or the nesting are beyond the bounds.
    """
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            if text[position:].isspace():
                break
            return None
        if sum(char.isdigit() for char in match["token"]) > MAX_DIGITS:
            raise TooLargeError(f"a number of more than {MAX_DIGITS} digits")
        tokens.append(match["token"])
        position = match.end()
    reader = _Reader(tokens)
    try:
        value = reader.product(0)
    except (_NoNumberError, ZeroDivisionError):
        return None
    return value if reader.at_end() else None


def is_written_decimal(text: str) -> bool:
    """Whether `text` is a number with a decimal point and digits after it, and nothing else."""
    return _DECIMAL.fullmatch(text.strip()) is not None


class _Reader:
    """Recursive descent over tokens."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0

    def at_end(self) -> bool:
        return self._next == len(self._tokens)

    def product(self, depth: int) -> Fraction:
        """sign* power (('*' | '/') sign* power)*"""
        value = self._signed(depth)
        while (operator := self._peek()) in {"*", "/", "\\times", "\\cdot", "\\div"}:
            self._next += 1
            right = self._signed(depth)
            value = _bounded(value / right if operator in {"/", "\\div"} else value * right)
        return value

    def _signed(self, depth: int) -> Fraction:
        negative = False
        while self._peek() in {"-", "+"}:
            negative ^= self._take() == "-"
        value = self._power(depth)
        return -value if negative else value

    def _power(self, depth: int) -> Fraction:
        base = self._atom(depth)
        if self._peek() != "^":
            return base
        self._next += 1
        exponent = self._atom(depth) if self._peek() in {"{", "("} else self._signed(depth)
        if exponent.denominator != 1:
            raise _NoNumberError
        if abs(exponent) > MAX_EXPONENT:
            raise TooLargeError(f"an exponent of more than {MAX_EXPONENT}")
        return _bounded(base ** int(exponent))

    def _atom(self, depth: int) -> Fraction:
        if depth >= MAX_DEPTH:
            raise TooLargeError(f"nested deeper than {MAX_DEPTH}")
        token = self._take()
        if token == "\\frac":
            return _bounded(self._argument(depth) / self._argument(depth))
        if token in {"(", "{"}:
            value = self.product(depth + 1)
            if self._take() != {"(": ")", "{": "}"}[token]:
                raise _NoNumberError
            return value
        value = _number(token)
        if self._peek() == "\\frac" and token.isdigit():  # a mixed number
            self._next += 1
            part = self._argument(depth) / self._argument(depth)
            if not 0 <= part < 1:
                raise _NoNumberError
            value += part
        return value

    def _argument(self, depth: int) -> Fraction:
        """A fraction's next argument: one in braces, or a single digit."""
        token = self._peek()
        if token.isdigit():
            if len(token) > 1:
                self._tokens[self._next] = token[1:]
            else:
                self._next += 1
            return Fraction(int(token[0]))
        if token != "{":
            raise _NoNumberError
        return self._atom(depth + 1)

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._next += 1
        return token


def _number(token: str) -> Fraction:
    if not token[:1].isdigit() and token[:1] != ".":
        raise _NoNumberError
    mantissa, _, exponent = token.lower().partition("e")
    if exponent and abs(int(exponent)) > MAX_EXPONENT:
        raise TooLargeError(f"an exponent of more than {MAX_EXPONENT}")
    value = Fraction(mantissa.rstrip(".") if mantissa.endswith(".") else mantissa)
    return value * Fraction(10) ** int(exponent) if exponent else value


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise TooLargeError(f"a value of more than {MAX_BITS} bits")
    return value
