"""Roots of integers, exactly and in bounded time."""

import math

_PRIMES = [n for n in range(2, 1000) if all(n % d for d in range(2, math.isqrt(n) + 1))]
_MAX_FACTORED = 10**18


def square_free(number: int) -> tuple[int, int] | None:
    """Return (a, r) with number = a^2 r and r square-free; None if that is not easily found."""
    whole = math.isqrt(number)
    if whole * whole == number:
        return whole, 1
    if number > _MAX_FACTORED:
        return None
    outer = radicand = 1
    for prime in _PRIMES:
        if prime * prime > number:
            break
        while number % prime == 0:
            number //= prime
            if number % prime == 0:
                number //= prime
                outer *= prime
            else:
                radicand *= prime
                break
    whole = math.isqrt(number)
    if whole * whole == number:
        return outer * whole, radicand
    # The rest has no factor below 1000: under 1000^3 it has at most two primes, and they differ.
    return (outer, radicand * number) if number < 10**9 else None


def integer_root(number: int, degree: int) -> int | None:
    """Return the exact root; None if there is none."""
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    while low <= high:
        middle = (low + high) // 2
        raised = middle**degree
        if raised == number:
            return middle
        low, high = (middle + 1, high) if raised < number else (low, middle - 1)
    return None
