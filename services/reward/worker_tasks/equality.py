r"""Decides by values at points whether two expressions are the same function, or two relations the same condition.

Equal means agreement to `AGREE_DIGITS` digits at unpredictable points, real ones if both values are real; different
means that they differ at one. None means that values do not decide: undefined nearly everywhere, or close. Variables
count: an expression in x is not one in y, and 2x + 1 is not 2y + 1.
"""

import hashlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from services.reward.worker_tasks.expression import AGREE, CONTEXT, DIGITS, Tree, UndefinedError, evaluate, symbols_of
from services.reward.worker_tasks.latex_algebra import Relation

_NUM_POINTS = 6
_FAR = frozenset({3, 4})
"""Points with large coordinates, where |x + 10| - 10 is not x."""
_LARGE, _LARGE_EXPONENT = 10**4, 20
"""Size of large coordinates: the second where exponentials would leave too few digits of a difference."""
_EXPONENTIAL = frozenset({"sinh", "cosh", "tanh"})
_DIFFER_DIGITS = 30
_TINY = CONTEXT.mpf(10) ** -60
_SHRINKS = CONTEXT.mpf(10) ** -60
"""What rounding errors become, at most, with twice the digits; a number that is not 0 stays as it is."""
_DIFFER = CONTEXT.mpf(10) ** -_DIFFER_DIGITS

_FLIPPED = {">": "<", ">=": "<="}


def are_equal(gold: Tree, given: Tree) -> bool | None:
    """Return whether the two have the same variables and the same values; None if that remains open."""
    symbols = symbols_of(gold)
    if symbols != symbols_of(given):
        return False
    found = [_agree(*values) for values in _values(gold, given, symbols)]
    if False in found:
        return False
    if None in found or len(found) < (2 if symbols else 1):
        return None
    return True


def are_same_relations(gold: Sequence[Relation], given: Sequence[Relation]) -> bool | None:
    """Return whether the chains say the same, link by link; None if that remains open."""
    ours, theirs = [_upward(chain) for chain in (gold, given)]
    if _symbols_of(ours) != _symbols_of(theirs):
        return False
    if len(ours) != len(theirs):
        return None
    found = [_is_same_relation(*pair) for pair in zip(ours, theirs, strict=True)]
    return True if all(found) else None


def distance(tree: Tree, value: Fraction) -> Any:
    """Return |tree - value| for a real number `tree`; None otherwise."""
    if symbols_of(tree):
        return None
    try:
        gap = _gap(tree, value)
        if gap is None or gap > AGREE * max(abs(value), 1):
            return gap
        with CONTEXT.workdps(2 * DIGITS):
            finer = _gap(tree, value)
    except UndefinedError:
        return None
    return CONTEXT.zero if finer is not None and finer <= _SHRINKS * gap else gap


def _gap(tree: Tree, value: Fraction) -> Any:
    """Return |tree - value| in the context's digits if `tree` is real there, else None."""
    number = evaluate(tree, {})
    return abs(CONTEXT.re(number) - CONTEXT.mpf(value.numerator) / value.denominator) if _is_real(number) else None


def _is_same_relation(gold: Relation, given: Relation) -> bool:
    """Return whether the differences are proportional, with a factor that keeps the direction."""
    if gold.operator != given.operator:
        return False
    ours, theirs = gold.difference, given.difference
    ratios = []
    for our_value, their_value in _values(ours, theirs, symbols_of(ours) | symbols_of(theirs)):
        if abs(our_value) < _TINY or abs(their_value) < _TINY:
            return False
        ratios.append(our_value / their_value)
    if len(ratios) < 2 or any(_agree(ratio, ratios[0]) is not True for ratio in ratios):
        return False
    return gold.operator in ("=", "!=") or (_is_real(ratios[0]) and CONTEXT.re(ratios[0]) > 0)


def _upward(chain: Sequence[Relation]) -> list[Relation]:
    """Return the chain with only < and <=; 3 > x > 1 becomes 1 < x < 3."""
    if all(relation.operator in _FLIPPED for relation in chain):
        return [Relation(_FLIPPED[relation.operator], relation.right, relation.left) for relation in reversed(chain)]
    return list(chain)


def _symbols_of(chain: Sequence[Relation]) -> frozenset[str]:
    return frozenset().union(*(symbols_of(side) for relation in chain for side in (relation.left, relation.right)))


def _values(left: Tree, right: Tree, symbols: frozenset[str]) -> list[tuple[Any, Any]]:
    """Return both values at several points where both are defined; where both are real, if there are such points."""
    large = _LARGE_EXPONENT if _has_exponentials(left) or _has_exponentials(right) else _LARGE
    found = []
    for point in _points(sorted(symbols), repr(left), large):
        try:
            found.append((evaluate(left, point), evaluate(right, point)))
        except UndefinedError:
            continue
    real = [(ours, theirs) for ours, theirs in found if _is_real(ours) and _is_real(theirs)]
    return real or found


def _has_exponentials(tree: Tree) -> bool:
    """Return whether a variable is in an exponent."""
    parts = [part for part in tree[1:] if isinstance(part, tuple)]
    if tree[0] in _EXPONENTIAL or (tree[0] == "power" and symbols_of(tree[2])):
        return True
    return any(map(_has_exponentials, parts))


def _points(names: Sequence[str], seed: str, large: int) -> Iterator[dict[str, Any]]:
    """Yield points with 19-digit coordinates, drawn from `seed`: two positive ones, then points of any sign."""
    for index in range(_NUM_POINTS if names else 1):
        point = {}
        for name in names:
            digest = hashlib.blake2b(f"{index} {name} {seed}".encode(), digest_size=9).digest()
            size = CONTEXT.mpf(int.from_bytes(digest[:8], "big")) / 2**63 + CONTEXT.mpf("0.05")
            is_negative = index in {2, 3} if name == names[0] else index >= 2 and digest[8] % 2
            if index in _FAR:
                size = (1 + size) * large
            point[name] = -size if is_negative else size
        yield point


def _is_real(value: Any) -> bool:
    return bool(abs(CONTEXT.im(value)) <= AGREE * max(abs(value), 1))


def _agree(ours: Any, theirs: Any) -> bool | None:
    scale = max(abs(ours), abs(theirs))
    if scale < _TINY:
        return True if ours == theirs else None
    gap = abs(ours - theirs) / scale
    if gap <= AGREE:
        return True
    return False if gap > _DIFFER else None
