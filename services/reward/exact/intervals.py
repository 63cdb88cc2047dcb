r"""Intervals and solved inequalities: `[1, 2)`, `1 \le x < 2`, `x > 3`, `(-\infty, 0) \cup (0, \infty)`."""

import functools
import itertools
import re

from services.reward.exact.nodes import Interval, Intervals, Node, Opaque
from services.reward.exact.numbers.algebra import Value, are_equal, has_variables, is_real, to_decimal
from services.reward.exact.numbers.number import read_number

_VARIABLE = re.compile(
    r"[A-Za-z](?:_\w|_\{\w{1,4}\})?|\\(?:theta|alpha|beta|gamma|lambda|phi|delta)|m? ?\\angle ?\w{1,3}"
)
_INFINITY = re.compile(r"(?P<sign>[-+]?) *\\infty")
_BUILDER = re.compile(r"(?P<variable>[A-Za-z])(?: *\\in *(?:\\mathbb ?\{? ?R ?\}?|R))? *[|:] *(?P<condition>.+)")
_FLIP = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_INEQUALITY = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z])|[<>]")


def read_bracketed_interval(text: str, squeezed: str, *, force: bool = False) -> Intervals | None:
    """Read an interval in brackets. Two numbers in brackets of one shape count only if `force`: they may be a point."""
    ends = text[1:-1].split(",")
    if len(ends) != 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    low, high = _end(ends[0]), _end(ends[1])
    if low is None or high is None:
        return None
    is_certain = (text[0] == "(") != (text[-1] == ")") or low.value is None or high.value is None
    if not (is_certain or force) or low.sign > 0 or high.sign < 0:
        return None
    has_low, has_high = text[0] == "[" and low.value is not None, text[-1] == "]" and high.value is not None
    part = Interval(low=low.value, has_low=has_low, high=high.value, has_high=has_high)
    return Intervals(text=squeezed, variable="", parts=(part,))


def read_inequality(parts: list[tuple[str, str]], squeezed: str) -> Intervals | None:
    """Read a solved inequality; `parts` are its sides, each with the relation before it."""
    texts = [part for part, _ in parts]
    signs = [sign for _, sign in parts[1:]]
    if len(parts) == 2:
        if _VARIABLE.fullmatch(texts[1]) and not _VARIABLE.fullmatch(texts[0]):
            texts.reverse()
            signs = [_FLIP.get(signs[0], signs[0])]
        bound = _end(texts[1])
        if not _VARIABLE.fullmatch(texts[0]) or bound is None:
            return None
        if signs[0] == "\\ne":
            below = Interval(low=None, has_low=False, high=bound.value, has_high=False)
            above = Interval(low=bound.value, has_low=False, high=None, has_high=False)
            return None if bound.value is None else _named(squeezed, texts[0], (below, above))
        closed = signs[0] in {"\\le", "\\ge"} and bound.value is not None
        if signs[0] in {"<", "\\le"}:
            part = Interval(low=None, has_low=False, high=bound.value, has_high=closed)
        else:
            part = Interval(low=bound.value, has_low=closed, high=None, has_high=False)
        return _named(squeezed, texts[0], (part,))
    if len(parts) != 3 or not _VARIABLE.fullmatch(texts[1]) or "\\ne" in signs:
        return None
    if signs[0] in {">", "\\ge"}:
        texts.reverse()
        signs = [_FLIP[sign] for sign in reversed(signs)]
    if not set(signs) <= {"<", "\\le"}:
        return None
    low, high = _end(texts[0]), _end(texts[2])
    if low is None or high is None or low.sign > 0 or high.sign < 0:
        return None
    part = Interval(
        low=low.value,
        has_low=signs[0] == "\\le" and low.value is not None,
        high=high.value,
        has_high=signs[1] == "\\le" and high.value is not None,
    )
    return _named(squeezed, texts[1], (part,))


def read_set_builder(inner: str, squeezed: str) -> Intervals | None:
    r"""Read `x | x > 3`: the condition, if that is a solved inequality."""
    built = _BUILDER.fullmatch(inner)
    if built is None:
        return None
    alternatives = [_read_condition(part, squeezed) for part in re.split(r"\bor\b", built["condition"])]
    found = [part for part in alternatives if part is not None and part.variable == built["variable"]]
    return unite(found, squeezed) if len(found) == len(alternatives) else None


def _read_condition(condition: str, squeezed: str) -> Intervals | None:
    signs = [""] + [sign[0] for sign in _INEQUALITY.finditer(condition)]
    sides = [side.strip() for side in _INEQUALITY.split(condition)]
    return read_inequality(list(zip(sides, signs, strict=True)), squeezed) if len(signs) > 1 else None


def read_complement(points: str, squeezed: str) -> Intervals | None:
    """Return all real numbers except `points`."""
    ends = [_end(point) for point in points.split(",")]
    values = [end.value for end in ends if end is not None and end.value is not None]
    if len(values) != len(ends):
        return None
    values.sort(key=to_decimal)
    bounds = [None, *values, None]
    parts = [
        Interval(low=low, has_low=False, high=high, has_high=False)
        for low, high in itertools.pairwise(bounds)
        if low is None or high is None or not are_equal(low, high)
    ]
    return Intervals(text=squeezed, variable="", parts=tuple(parts))


def unite(parts: list[Intervals], squeezed: str) -> Intervals:
    """Return the union, in ascending order, with touching intervals joined."""
    names = {part.variable for part in parts if part.variable}
    pieces = [piece for part in parts for piece in part.parts]
    pieces.sort(key=functools.cmp_to_key(_by_low))
    joined: list[Interval] = []
    for piece in pieces:
        if joined and _touch(joined[-1], piece):
            joined[-1] = _join(joined[-1], piece)
        else:
            joined.append(piece)
    variable = names.pop() if len(names) == 1 else ("," if names else "")
    return Intervals(text=squeezed, variable=variable, parts=tuple(joined))


def intersect(parts: list[Intervals], squeezed: str) -> Node:
    """Return the intersection of several intervals of one variable."""
    pieces = [part.parts[0] for part in parts]
    if len({part.variable for part in parts}) > 1 or any(len(part.parts) != 1 for part in parts):
        return Opaque(text=squeezed)
    low, high = pieces[0], pieces[0]
    for piece in pieces[1:]:
        low = low if _by_low(low, piece) > 0 else piece
        high = high if _by_high(high, piece) < 0 else piece
    if low.low is not None and high.high is not None and to_decimal(low.low) >= to_decimal(high.high):
        return Opaque(text=squeezed)
    part = Interval(low=low.low, has_low=low.has_low, high=high.high, has_high=high.has_high)
    return Intervals(text=squeezed, variable=parts[0].variable, parts=(part,))


def same_intervals(gold: Intervals, answer: Intervals) -> bool:
    """Return whether both are the same numbers, of the same variable if both name one."""
    if gold.variable and answer.variable and gold.variable != answer.variable:
        return False
    if len(gold.parts) != len(answer.parts):
        return False
    return all(
        _same_end(one.low, other.low)
        and _same_end(one.high, other.high)
        and (one.has_low, one.has_high) == (other.has_low, other.has_high)
        for one, other in zip(gold.parts, answer.parts, strict=True)
    )


class _End:
    """An end of an interval: a real number, or infinity with its sign."""

    __slots__ = ("sign", "value")

    def __init__(self, value: Value | None, sign: int = 0) -> None:
        self.value = value
        self.sign = sign


def _end(text: str) -> _End | None:
    text = text.strip()
    infinite = _INFINITY.fullmatch(text)
    if infinite is not None:
        return _End(None, -1 if infinite["sign"] == "-" else 1)
    number = read_number(text)
    if number is None or has_variables(number.value) or not is_real(number.value):
        return None
    return _End(number.value)


def _named(squeezed: str, variable: str, parts: tuple[Interval, ...]) -> Intervals:
    return Intervals(text=squeezed, variable=re.sub(r"[ {}]|^m(?= ?\\)", "", variable), parts=parts)


def _by_low(one: Interval, other: Interval) -> int:
    if one.low is None or other.low is None:
        return (one.low is not None) - (other.low is not None)
    left, right = to_decimal(one.low), to_decimal(other.low)
    return (left > right) - (left < right) or other.has_low - one.has_low


def _by_high(one: Interval, other: Interval) -> int:
    if one.high is None or other.high is None:
        return (one.high is None) - (other.high is None)
    left, right = to_decimal(one.high), to_decimal(other.high)
    return (left > right) - (left < right) or one.has_high - other.has_high


def _touch(left: Interval, right: Interval) -> bool:
    if left.high is None or right.low is None:
        return True
    if are_equal(left.high, right.low):
        return left.has_high or right.has_low
    return to_decimal(left.high) > to_decimal(right.low)


def _join(left: Interval, right: Interval) -> Interval:
    if left.high is None or right.high is None:
        high, has_high = None, False
    elif are_equal(left.high, right.high):
        high, has_high = left.high, left.has_high or right.has_high
    elif to_decimal(left.high) > to_decimal(right.high):
        high, has_high = left.high, left.has_high
    else:
        high, has_high = right.high, right.has_high
    has_low = left.has_low or (right.has_low and _same_end(left.low, right.low))
    return Interval(low=left.low, has_low=has_low, high=high, has_high=has_high)


def _same_end(one: Value | None, other: Value | None) -> bool:
    if one is None or other is None:
        return one is None and other is None
    return are_equal(one, other)
