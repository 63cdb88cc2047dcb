"""Decides whether later text of a response takes its answer back."""

from services.reward.exact.comparison import Outcome, Rules, Side, compare
from services.reward.exact.nodes import Chain, Choice, Intervals, Matrix, Named, Node, Ratio, Scalar, Set, Tuple
from services.reward.exact.numbers.algebra import has_variables
from services.reward.exact.numbers.scalars import is_rounded

_LOOSE = Rules(decimal_figures=1)
_MAX_CHARS = 512


def contradicts(first: str, later: str) -> bool:
    """Return whether `later` is a different value from `first`.

    False if it cannot be read as a value, if it is a rounding or the letter of a choice beside a value, and if only
    symbolic algebra could tell.
    """
    if max(len(first), len(later)) > _MAX_CHARS:
        return False
    one, other = Side.of(first), Side.of(later)
    if not other.is_too_large:
        if not _is_value(other.node) or _is_choice(one.node) != _is_choice(other.node):
            return False
        if _has_variables(other.node) and not _has_variables(one.node):
            return False
        if _is_rounding(_body(one.node), _body(other.node)):
            return False
    return not {compare(one, other, _LOOSE), compare(other, one, _LOOSE)} & {Outcome.RIGHT, Outcome.OPEN}


def _is_value(node: Node) -> bool:
    match node:
        case Scalar() | Ratio() | Intervals() | Choice() | Matrix():
            return True
        case Named(body=body):
            return _is_value(body)
        case Chain(parts=parts) | Tuple(items=parts) | Set(items=parts):
            return len(parts) > 0 and all(map(_is_value, parts))
    return False


def _is_rounding(one: Node, other: Node) -> bool:
    return isinstance(one, Scalar) and isinstance(other, Scalar) and is_rounded(one, other)


def _has_variables(node: Node) -> bool:
    body = _body(node)
    return isinstance(body, Scalar) and has_variables(body.number.value)


def _is_choice(node: Node) -> bool:
    return isinstance(_body(node), Choice)


def _body(node: Node) -> Node:
    return node.body if isinstance(node, Named) else node
