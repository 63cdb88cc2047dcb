r"""The grammar of numbers and polynomials: recursive descent over tokens, bounded in depth, digits and work.

Integers, decimals, `1.5e3`, `0.\overline{3}`, `\frac{a}{b}`, `\frac12`, `a/b`, mixed numbers `7\frac{3}{4}`, `8 1/2`,
roots, powers, products with and without a sign, sums, brackets, bars, factorials and binomials of small numbers, sines
and logarithms, and single letters. It never guesses at unknown text.
"""

import re
from decimal import Decimal
from fractions import Fraction

from services.reward.exact.numbers.algebra import (
    MAX_EXPONENT,
    NoValueError,
    Rational,
    TooLargeError,
    Value,
    add,
    as_rational,
    constant,
    divide,
    has_variables,
    multiply,
    negate,
    power,
    root,
    symbol,
)
from services.reward.exact.numbers.functions import FUNCTIONS, absolute, binomial, factorial, logarithm

MAX_DEPTH = 24
MAX_DIGITS = 400
MAX_WORK = 4096
"""Maximum products of terms in a whole text."""
MAX_FUNCTIONS = 16
"""Maximum functions, higher roots and irrational powers in a whole text."""

_TOKEN = re.compile(
    r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+|\\(?:overline|bar|dot) ?\{ ?\d+ ?\})?|\\[A-Za-z]++|[A-Za-z]++|\*\*|\S",
    re.ASCII,
)
_GREEK = re.compile(
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|theta|lambda|mu|nu|xi|rho|sigma|tau|(?:var)?phi|chi|psi|omega"
    r"|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega|ell|pi)"
)
_DEGREE = constant(Fraction(1, 180))
_OPENING = {"(": ")", "{": "}", "[": "]"}
_MAX_WORD = 3
"""Maximum letters in a row that may be a product; more are a word."""


def parse(text: str) -> tuple[Value, bool]:
    """Return the value of `text`, and whether it is unfinished: rational, but with a sum that was not carried out.

    Raises:
        NoValueError: it is not in the grammar.
        TooLargeError: digits, an exponent, the nesting or the work are beyond the bounds.
        ZeroDivisionError: it divides by zero.
    """
    tokens: list[str] = []
    for token in _TOKEN.findall(text):
        if token.isalpha():
            if len(token) > _MAX_WORD:
                raise NoValueError
            tokens.extend(token)
        else:
            tokens.append(token)
    return _Reader(tokens).whole()


class _Reader:
    """Recursive descent over tokens."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0
        self._work = 0
        self._functions = 0
        self._has_plain_sum = False

    def whole(self) -> tuple[Value, bool]:
        """Return the value of all tokens, and whether it is unfinished."""
        value = self._sum(0)
        if self._next != len(self._tokens):
            raise NoValueError
        return value, self._has_plain_sum and as_rational(value) is not None

    def _sum(self, depth: int) -> Value:
        """product (('+' | '-') product)*"""
        if depth > MAX_DEPTH:
            raise TooLargeError(f"nested deeper than {MAX_DEPTH}")
        value = self._product(depth)
        while (operator := self._peek()) in {"+", "-"}:
            self._next += 1
            right = self._product(depth)
            self._has_plain_sum |= as_rational(value) is not None and as_rational(right) is not None
            value = add(value, negate(right) if operator == "-" else right)
        return value

    def _product(self, depth: int) -> Value:
        """signed (('*' | '/')? signed)*: without a sign, only factors that cannot be mistaken."""
        value = self._signed(depth)
        while True:
            operator = self._peek()
            if operator in {"*", "\\times", "\\cdot", "/", "\\div"}:
                self._next += 1
                right = self._signed(depth)
                if operator in {"/", "\\div"}:
                    self._spend(value, right)
                    value = divide(value, right)
                    continue
            elif self._starts_factor(operator):
                right = self._power(depth)
            else:
                return value
            self._spend(value, right)
            value = multiply(value, right)

    def _signed(self, depth: int) -> Value:
        negative = False
        while self._peek() in {"-", "+"}:
            negative ^= self._take() == "-"
        value = self._power(depth)
        return negate(value) if negative else value

    def _power(self, depth: int) -> Value:
        value = self._atom(depth)
        while True:
            token = self._peek()
            if token == "!":
                self._next += 1
                value = factorial(value)
            elif token in {"^", "**"}:
                self._next += 1
                if self._is_degree():
                    value = multiply(multiply(value, _DEGREE), symbol("\\pi"))
                else:
                    value = self._raise(value, self._exponent(depth + 1))
            else:
                return value

    def _exponent(self, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise TooLargeError(f"nested deeper than {MAX_DEPTH}")
        token = self._peek()
        if token in {"-", "+"}:
            self._next += 1
            value = self._exponent(depth + 1)
            return negate(value) if token == "-" else value
        value = self._atom(depth)
        if self._peek() in {"^", "**"}:
            self._next += 1
            value = self._raise(value, self._exponent(depth + 1))
        return value

    def _is_degree(self) -> bool:
        ahead = self._tokens[self._next : self._next + 3]
        if ahead[:1] == ["\\circ"]:
            self._next += 1
        elif ahead == ["{", "\\circ", "}"]:
            self._next += 3
        else:
            return False
        return True

    def _atom(self, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise TooLargeError(f"nested deeper than {MAX_DEPTH}")
        token = self._take()
        first = token[:1]
        if first.isdigit() or first == ".":
            return constant(self._mixed(_plain(token)))
        if first == "\\":
            return self._command(token, depth)
        if token in {"(", "{", "["}:
            value = self._sum(depth + 1)
            if self._take() != _OPENING[token]:
                raise NoValueError
            return value
        if token == "|":
            value = self._sum(depth + 1)
            if self._take() != "|":
                raise NoValueError
            return absolute(value)
        if first.isalpha() and first.isascii():
            return self._symbol(token)
        raise NoValueError

    def _command(self, token: str, depth: int) -> Value:
        if token == "\\frac":
            upper = self._argument(depth)
            return divide(upper, self._argument(depth))
        if token == "\\sqrt":
            degree: Rational = 2
            if self._peek() == "[":
                self._next += 1
                value = self._sum(depth + 1)
                index = as_rational(value)
                if self._take() != "]" or index is None or index.denominator != 1:
                    raise NoValueError
                degree = index
            value = self._atom(depth + 1)
            if degree != 2:
                self._count_function()
            return root(value, int(degree))
        if token == "\\binom":
            upper = self._argument(depth)
            return binomial(upper, self._argument(depth))
        if _GREEK.fullmatch(token):
            return self._symbol(token)
        if token in FUNCTIONS:
            return self._function(token, depth)
        raise NoValueError

    def _function(self, token: str, depth: int) -> Value:
        self._count_function()
        exponent = base = None
        if token == "\\log" and self._peek() == "_":
            self._next += 1
            base = self._argument(depth)
        elif self._peek() == "^":
            self._next += 1
            exponent = self._exponent(depth + 1)
            power_of = as_rational(exponent)
            if power_of is None or power_of < 0:  # an inverse function
                raise NoValueError
        argument = self._power(depth + 1)
        while self._starts_factor(self._peek()) and self._peek() not in FUNCTIONS and self._peek() != "(":
            argument = multiply(argument, self._power(depth + 1))
        if has_variables(argument):
            raise NoValueError
        value = FUNCTIONS[token](argument) if base is None else logarithm(argument, base)
        return value if exponent is None else power(value, exponent)

    def _symbol(self, name: str) -> Value:
        """Read a symbol with its subscript and primes."""
        if self._peek() == "_":
            self._next += 1
            token = self._take()
            if token == "{":
                inner = self._take()
                if self._take() != "}":
                    raise NoValueError
                token = inner
            if not token.isalnum():
                raise NoValueError
            name += f"_{token}"
        while self._peek() == "'":
            self._next += 1
            name += "'"
        return symbol(name)

    def _mixed(self, whole: Rational) -> Rational:
        """Return `whole` plus the proper fraction that follows it, if any."""
        ahead = self._tokens[self._next : self._next + 7]
        if whole.denominator != 1 or not ahead:
            return whole
        if ahead[0] == "\\frac":
            flat = "".join(ahead[1:])
            match = re.match(r"\{(\d+)\}\{(\d+)\}", flat)
            if match is not None:
                upper, lower, length = _plain(match[1]), _plain(match[2]), 7
            elif len(ahead) > 1 and re.fullmatch(r"\d\d", ahead[1]):
                upper, lower, length = int(ahead[1][0]), int(ahead[1][1]), 2
            else:
                return whole
        elif len(ahead) > 2 and ahead[0].isdigit() and ahead[1] == "/" and ahead[2].isdigit():
            upper, lower, length = _plain(ahead[0]), _plain(ahead[2]), 3
        else:
            return whole
        if not 0 <= upper < lower:
            raise NoValueError
        self._next += length
        return whole + Fraction(upper, lower)

    def _argument(self, depth: int) -> Value:
        """Read a command's next argument: in braces, or a single digit or symbol."""
        token = self._peek()
        if token.isdigit():
            if len(token) > 1:
                self._tokens[self._next] = token[1:]
            else:
                self._next += 1
            return constant(int(token[0]))
        if token in {"(", "["}:
            raise NoValueError
        return self._atom(depth + 1)

    def _starts_factor(self, token: str) -> bool:
        first = token[:1]
        return (
            first in {"(", "{", "["}
            or first.isalpha()
            or token in {"\\frac", "\\sqrt", "\\pi", "\\binom"}
            or token in FUNCTIONS
            or _GREEK.fullmatch(token) is not None
        )

    def _spend(self, left: Value, right: Value) -> None:
        if not isinstance(left, Decimal) and not isinstance(right, Decimal):
            self._work += len(left) * len(right)
            if self._work > MAX_WORK:
                raise TooLargeError(f"more than {MAX_WORK} products of terms")

    def _count_function(self) -> None:
        self._functions += 1
        if self._functions > MAX_FUNCTIONS:
            raise TooLargeError(f"more than {MAX_FUNCTIONS} functions")

    def _raise(self, base: Value, exponent: Value) -> Value:
        if not isinstance(base, Decimal) and len(base) > 1:
            self._work += MAX_WORK // 16
            if self._work > MAX_WORK:
                raise TooLargeError(f"more than {MAX_WORK} products of terms")
        rational = as_rational(exponent)
        if isinstance(base, Decimal) or rational is None or rational.denominator > 2:
            self._count_function()
        return power(base, exponent)

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._next += 1
        return token


def _plain(token: str) -> Rational:
    """Return the value of a number token."""
    if len(token) > MAX_DIGITS:
        raise TooLargeError(f"a number of more than {MAX_DIGITS} digits")
    if token.isdigit():
        return int(token)
    mantissa, repeated, digits = token.partition("\\")
    if repeated:
        whole, _, part = mantissa.partition(".")
        period = "".join(filter(str.isdigit, digits))
        if "." not in mantissa:
            raise NoValueError
        shifted = int(whole + part + period) - int((whole + part) or "0")
        return Fraction(shifted, 10 ** len(part) * (10 ** len(period) - 1))
    mantissa, _, exponent = token.lower().partition("e")
    if exponent and (len(exponent) > 4 or abs(int(exponent)) > MAX_EXPONENT):
        raise TooLargeError(f"an exponent of more than {MAX_EXPONENT}")
    whole, _, part = mantissa.partition(".")
    value = Fraction(int((whole + part) or "0"), 10 ** len(part))
    if exponent:
        value *= Fraction(10) ** int(exponent)
    return value.numerator if value.denominator == 1 else value
