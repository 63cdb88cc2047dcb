r"""Numbers with powers that are too large to write out: `2^{2024} - 1`, `4^{1012}`, `\frac{3}{10^{100}}`.

They are compared by their remainders. A rational number has a remainder for every prime that does not divide its
denominator, and equal numbers have equal remainders. Different numbers have the same remainder for a random prime of
256 bits with a probability below 2^-100: their difference has fewer than 2^110 bits within the bounds below, so at most
2^102 of the 2^248 primes divide it. Each process draws its own prime and keeps it secret, so that no answer can be made
to fit it.
"""

import re
import secrets
from functools import lru_cache

from services.reward.exact.numbers.algebra import MAX_EXPONENT, NoValueError, TooLargeError
from services.reward.exact.numbers.grammar import MAX_DEPTH, MAX_DIGITS, MAX_FUNCTIONS

_TOKEN = re.compile(r"\d+(?:\.\d+)?|\.\d+|\\[A-Za-z]+|\*\*|\S", re.ASCII)
_CLOSING = {"(": ")", "{": "}", "[": "]"}
_PRIME_BITS = 256
_MAX_EXPONENT_BITS = 64
_MAX_NESTED = 4
"""Maximum number of powers that contain powers; their exponents are at most `MAX_EXPONENT`."""
_ROUNDS = 40
"""Rounds of the Miller-Rabin test: a number that passes is not prime with a probability below 4^-40."""


def read_large(text: str) -> "tuple[int, bool] | None":
    """Return a stand-in for the value of a rational number with powers of any size, and whether it contains a sum.

    Stand-ins of one process are equal if and only if the numbers are. None if the text is not such a number: integers,
    decimals, brackets, `+ - * /`, fractions, and powers whose exponents are integers of at most 64 bits.

    Raises:
        TooLargeError: an exponent, the digits, the nesting or the number of powers are beyond the bounds.
    """
    try:
        return _Reader(_TOKEN.findall(text)).whole()
    except (NoValueError, ZeroDivisionError):
        return None


class _Reader:
    """Recursive descent over tokens; every value is a remainder."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0
        self._num_powers = self._num_nested = 0
        self._has_sum = False

    def whole(self) -> tuple[int, bool]:
        """Read all tokens."""
        value = self._sum(0)
        if self._next != len(self._tokens):
            raise NoValueError
        return value, self._has_sum

    def _sum(self, depth: int) -> int:
        """product (('+' | '-') product)*"""
        if depth > MAX_DEPTH:
            raise TooLargeError(f"nested deeper than {MAX_DEPTH}")
        value = self._product(depth)
        while (sign := self._peek()) in {"+", "-"}:
            self._next += 1
            self._has_sum = True
            right = self._product(depth)
            value = (value + (right if sign == "+" else -right)) % _prime()
        return value

    def _product(self, depth: int) -> int:
        value = self._signed(depth)
        while True:
            operator = self._peek()
            if operator in {"*", "\\times", "\\cdot"}:
                self._next += 1
                value = value * self._signed(depth) % _prime()
            elif operator in {"/", "\\div"}:
                self._next += 1
                value = value * _inverse(self._signed(depth)) % _prime()
            elif operator in {"(", "{", "[", "\\frac"}:
                value = value * self._power(depth) % _prime()
            else:
                return value

    def _signed(self, depth: int) -> int:
        is_negative = False
        while self._peek() in {"-", "+"}:
            is_negative ^= self._take() == "-"
        value = self._power(depth)
        return -value % _prime() if is_negative else value

    def _power(self, depth: int) -> int:
        num_before = self._num_powers
        value = self._atom(depth)
        if self._peek() not in {"^", "**"}:
            return value
        self._next += 1
        is_nested = self._num_powers > num_before
        self._num_powers += 1
        self._num_nested += is_nested
        if self._num_powers > MAX_FUNCTIONS or self._num_nested > _MAX_NESTED:
            raise TooLargeError(f"more than {MAX_FUNCTIONS} powers, or {_MAX_NESTED} of powers")
        exponent = self._exponent(depth + 1)
        if is_nested and abs(exponent) > MAX_EXPONENT:
            raise TooLargeError(f"an exponent of more than {MAX_EXPONENT} of a power")
        return pow(value if exponent >= 0 else _inverse(value), abs(exponent), _prime())

    def _exponent(self, depth: int) -> int:
        """Read an integer: digits, in brackets or not, with a sign, or a power of integers, from the right."""
        if depth > MAX_DEPTH:
            raise TooLargeError(f"nested deeper than {MAX_DEPTH}")
        token = self._take()
        if token in {"-", "+"}:
            value = self._exponent(depth + 1)
            return -value if token == "-" else value
        if token in _CLOSING:
            value = self._exponent(depth + 1)
            if self._take() != _CLOSING[token]:
                raise NoValueError
        else:
            value = _digits(token)
        if self._peek() in {"^", "**"}:
            self._next += 1
            upper = self._exponent(depth + 1)
            if upper < 0:
                raise NoValueError
            if abs(value) > 1 and upper * value.bit_length() > 2 * _MAX_EXPONENT_BITS:
                raise TooLargeError(f"an exponent of more than {_MAX_EXPONENT_BITS} bits")
            value **= upper if abs(value) > 1 else min(upper, 2 + upper % 2)
        if value.bit_length() > _MAX_EXPONENT_BITS:
            raise TooLargeError(f"an exponent of more than {_MAX_EXPONENT_BITS} bits")
        return value

    def _atom(self, depth: int) -> int:
        token = self._take()
        if token in _CLOSING:
            value = self._sum(depth + 1)
            if self._take() != _CLOSING[token]:
                raise NoValueError
            return value
        if token == "\\frac":
            upper = self._atom(depth + 1) if self._peek() == "{" else self._fail()
            return upper * _inverse(self._atom(depth + 1) if self._peek() == "{" else self._fail()) % _prime()
        whole, _, part = token.partition(".")
        value = _digits(whole + part) % _prime()
        return value * _inverse(pow(10, len(part), _prime())) % _prime() if part else value

    def _fail(self) -> int:
        raise NoValueError

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._next += 1
        return token


def _digits(token: str) -> int:
    if not token.isdigit():
        raise NoValueError
    if len(token) > MAX_DIGITS:
        raise TooLargeError(f"a number of more than {MAX_DIGITS} digits")
    return int(token)


def _inverse(value: int) -> int:
    if not value:
        raise ZeroDivisionError
    return pow(value, -1, _prime())


@lru_cache(maxsize=1)
def _prime() -> int:
    while True:
        candidate = secrets.randbits(_PRIME_BITS) | (1 << (_PRIME_BITS - 1)) | 1
        if _is_prime(candidate):
            return candidate


def _is_prime(number: int) -> bool:
    """Run the Miller-Rabin test on an odd number above 3."""
    odd = number - 1
    twos = (odd & -odd).bit_length() - 1
    odd >>= twos
    for _ in range(_ROUNDS):
        power = pow(2 + secrets.randbelow(number - 3), odd, number)
        if power in {1, number - 1}:
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True
