"""How much memory an answer takes: an upper bound, by its kind and its numbers."""

from decimal import Decimal

from services.reward.exact.nodes import Chain, Choice, Named, Node, Opaque, Ratio, Scalar, Set, Tuple, Words
from services.reward.exact.numbers.algebra import Value

_MAX_CHARS = 48
"""Bounds how many numbers there are."""
_MAX_TERMS = 8
_MAX_BITS = 128


def is_small(text: str, node: Node) -> bool:
    """Return whether `text`, read as `node`, takes at most 16 kB.

    Without bounds on its numbers it may take 80 kB: `(9^64)^40 (a+b)^31`. Intervals, matrices and equations count as
    large.
    """
    return len(text) <= _MAX_CHARS and _has_short_numbers(node)


def _has_short_numbers(node: Node) -> bool:
    match node:
        case Opaque() | Words() | Choice(rest=None):
            return True
        case Scalar(number=number):
            return _is_short(number.value)
        case Ratio(terms=terms):
            return all(map(_is_short, terms))
        case Named(body=body):
            return _has_short_numbers(body)
        case Tuple(items=parts) | Set(items=parts) | Chain(parts=parts):
            return all(map(_has_short_numbers, parts))
    return False


def _is_short(value: Value) -> bool:
    if isinstance(value, Decimal):  # of bounded precision
        return True
    return len(value) <= _MAX_TERMS and all(
        max(coefficient.numerator.bit_length(), coefficient.denominator.bit_length()) <= _MAX_BITS
        for coefficient in value.values()
    )
