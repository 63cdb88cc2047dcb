"""Compares two answers that were read, part by part, by the kind of the gold answer.

Every part of a structure is compared like an answer of its own: a tuple of numbers follows the rules of numbers.
"""

import enum
import math
import re

from services.reward.exact.equations import same_equation
from services.reward.exact.intervals import read_bracketed_interval, same_intervals
from services.reward.exact.nodes import (
    Chain,
    Choice,
    Equation,
    Intervals,
    Matrix,
    Named,
    Node,
    Opaque,
    Ratio,
    Relation,
    Scalar,
    Set,
    Tuple,
    Words,
)
from services.reward.exact.numbers.algebra import (
    Value,
    are_equal,
    as_rational,
    constant,
    has_variables,
    multiply,
    symbol,
)
from services.reward.exact.numbers.scalars import Rules, is_rounded, same_scalars

_INVERSE = re.compile(r"\\arc(?:sin|cos|tan)(?![A-Za-z])|\\(?:sin|cos|tan) ?\^ ?\{ ?-1 ?\}")
_WITH_INVERSES = re.compile(
    r"(?:\\(?:arcsin|arccos|arctan|sin|cos|tan|frac|sqrt|pi|cdot|times)(?![A-Za-z])|[\d\s.+*/(){}^-])+"
)
_MAX_FUNCTION_CHARS = 64
_TIME = re.compile(r"(\d{1,2}):([0-5]\d)")
_NUMBER = re.compile(r"\d+")
_OTHER_CHOICE = re.compile(r"\( ?[A-J] ?\)|\b[A-J][.)]|^(?:not|or|and)\b")


class Outcome(enum.Enum):
    """Outcome of a comparison."""

    RIGHT = enum.auto()
    WRONG = enum.auto()
    UNREADABLE = enum.auto()
    """The answer cannot be compared with this gold answer."""
    TOO_LARGE = enum.auto()
    OPEN = enum.auto()
    """Only symbolic algebra can tell."""


def match(gold: Node, answer: Node, rules: Rules) -> Outcome:
    """Compare `answer` with `gold`. May raise ArithmeticError if a value is beyond the bounds."""
    if gold.text == answer.text:
        return Outcome.RIGHT
    if isinstance(gold, Named | Equation) and isinstance(answer, Named | Equation):
        return _same_named(gold, answer, rules)
    if isinstance(gold, Named):
        return match(gold.body, answer, rules)
    if isinstance(answer, Named):
        return match(gold, answer.body, rules)
    if isinstance(gold, Equation) and gold.value is not None:
        return match(gold.value, answer, rules)
    if isinstance(answer, Equation) and answer.value is not None:
        return match(gold, answer.value, rules)
    if isinstance(answer, Set) and not isinstance(gold, Set) and len(items := _distinct(answer.items, rules)) == 1:
        return match(gold, items[0], rules)
    if isinstance(answer, Chain) and not isinstance(gold, Chain):
        return _same_chain(gold, answer, rules)
    if isinstance(gold, Choice):
        return _same_choice(gold, answer, rules)
    if isinstance(answer, Choice) and answer.rest is not None:
        return match(gold, answer.rest, rules)
    if isinstance(gold, Scalar):
        return _same_as_scalar(gold, answer, rules)
    if isinstance(gold, Ratio):
        return _same_ratio(gold, answer)
    if isinstance(gold, Set):
        return _same_set(gold, answer, rules)
    if isinstance(gold, Tuple):
        return _same_tuple(gold, answer, rules)
    if isinstance(gold, Intervals):
        return _same_as_intervals(gold, answer)
    if isinstance(gold, Matrix):
        return _same_matrix(gold, answer, rules)
    if isinstance(gold, Relation):
        if not isinstance(answer, Relation):
            return Outcome.UNREADABLE if isinstance(answer, Opaque) else Outcome.WRONG
        sides = (answer.left, answer.right)
        return _decided(gold.sign == answer.sign and (gold.left, gold.right) in {sides, sides[::-1]})
    if isinstance(gold, Words):
        return _decided(isinstance(answer, Words) and gold.words == answer.words)
    if isinstance(answer, Words | Choice | Relation) or not gold.text.isascii():
        return Outcome.WRONG
    return Outcome.OPEN


def _same_named(gold: Named | Equation, answer: Named | Equation, rules: Rules) -> Outcome:
    if isinstance(gold, Named) and isinstance(answer, Named):
        outcome = Outcome.WRONG
        if gold.name == answer.name or not _are_other_names(gold.name, answer.name):
            outcome = match(gold.body, answer.body, rules)
        if outcome is not Outcome.RIGHT and gold.name != answer.name and _is_of_variables(gold):
            found = same_equation(gold, answer)
            return Outcome.OPEN if found is None else _decided(found)
        return outcome
    if isinstance(gold, Named) and isinstance(gold.body, Scalar) and not has_variables(gold.body.number.value):
        return Outcome.UNREADABLE  # still unsolved
    found = same_equation(gold, answer)
    return Outcome.OPEN if found is None else _decided(found)


def _is_of_variables(side: Named) -> bool:
    """Return whether it is an equation between variables, such as y = 2x."""
    return isinstance(side.body, Opaque) or (isinstance(side.body, Scalar) and has_variables(side.body.number.value))


def _are_other_names(one: str, other: str) -> bool:
    """Return whether two names cannot mean the same: other letters, other points."""
    one, other = one.removeprefix("\\angle").removeprefix("\\triangle"), other.removeprefix("\\angle")
    other = other.removeprefix("\\triangle")
    if one in {other, other[::-1]}:
        return False
    if (number := _NUMBER.findall(one)) and (other_number := _NUMBER.findall(other)) and number != other_number:
        return True
    return (
        len(one) == len(other) == 1
        or (one[:3].isupper() and other[:3].isupper())
        or (one.startswith("\\") and other.startswith("\\"))
        or "_" in one + other
    )


def _same_chain(gold: Node, chain: Chain, rules: Rules) -> Outcome:
    """Compare a chain: its values must be equal as it says, and one must be the gold's."""
    first = chain.parts[0]
    outcomes = [match(gold, part, rules) for part in chain.parts]
    if not chain.is_named and not any(chain.is_approximate):
        whole = as_rational(gold.number.value) if isinstance(gold, Scalar) else None
        if whole is not None and whole.denominator == 1 and len({part.text for part in chain.parts}) == 1:
            return Outcome.UNREADABLE  # 0 = 0 remains of an equation without a solution
        is_right = set(outcomes) == {Outcome.RIGHT} or (Outcome.RIGHT in outcomes and _sides_agree(chain.parts))
        return Outcome.RIGHT if is_right else Outcome.UNREADABLE
    for part, is_approximate in zip(chain.parts[1:], chain.is_approximate, strict=True):
        if not (isinstance(first, Scalar) and isinstance(part, Scalar)):
            return Outcome.UNREADABLE
        if not (is_rounded(first, part) if is_approximate else are_equal(first.number.value, part.number.value)):
            return Outcome.WRONG
    if isinstance(gold, Scalar) and gold.number.places == 0 and not _has_value(first, gold):
        return Outcome.WRONG  # 4.6 is not 5, though it rounds to it
    return Outcome.RIGHT if Outcome.RIGHT in outcomes else Outcome.WRONG


def _has_value(part: Node, gold: Scalar) -> bool:
    """Return whether a part of a chain is exactly the gold's number, though it may be its work: 180 - 115."""
    return isinstance(part, Scalar) and are_equal(part.number.value, gold.number.value)


def _sides_agree(sides: tuple[Node, ...]) -> bool:
    """Return whether all sides are the same number: work and its result."""
    first = sides[0]
    return isinstance(first, Scalar) and all(
        isinstance(side, Scalar)
        and (first.unit is None or side.unit is None or first.unit == side.unit)
        and are_equal(first.number.value, side.number.value)
        and not has_variables(side.number.value)
        for side in sides
    )


def _same_choice(gold: Choice, answer: Node, rules: Rules) -> Outcome:
    if isinstance(answer, Choice):
        return _decided(gold.letter == answer.letter and _agree(gold.rest, answer.rest, rules))
    if gold.rest is not None:
        return match(gold.rest, answer, rules)
    if isinstance(answer, Opaque):
        return Outcome.UNREADABLE
    if isinstance(answer, Scalar) and len(gold.text) == 1:
        return _decided(are_equal(symbol(gold.letter), answer.number.value))
    return Outcome.WRONG


def _agree(gold: Node | None, answer: Node | None, rules: Rules) -> bool:
    """Return whether the text beside the letter still belongs to the same answer."""
    if answer is None:
        return True
    if isinstance(answer, Choice) or _OTHER_CHOICE.search(answer.text):
        return False
    return not (isinstance(gold, Scalar) and isinstance(answer, Scalar)) or same_scalars(gold, answer, rules)


def _same_as_scalar(gold: Scalar, answer: Node, rules: Rules) -> Outcome:
    if isinstance(answer, Scalar):
        return _decided(same_scalars(gold, answer, rules))
    if isinstance(answer, Opaque):
        if has_variables(gold.number.value):
            return Outcome.OPEN
        if len(answer.text) <= _MAX_FUNCTION_CHARS and _INVERSE.search(answer.text):
            return Outcome.OPEN if _WITH_INVERSES.fullmatch(answer.text) else Outcome.UNREADABLE
        return Outcome.UNREADABLE
    if isinstance(answer, Words | Relation | Equation):
        return Outcome.UNREADABLE
    return Outcome.WRONG


def _same_ratio(gold: Ratio, answer: Node) -> Outcome:
    if isinstance(answer, Scalar) and len(gold.terms) == 2:
        terms: tuple[Value, ...] = (answer.number.value, constant(1))
        if answer.unit is not None or answer.number.is_unfinished:
            return Outcome.WRONG
    elif isinstance(answer, Ratio):
        terms = answer.terms
    else:
        return Outcome.UNREADABLE if isinstance(answer, Opaque) else Outcome.WRONG
    if _is_time(gold):
        return _decided(isinstance(answer, Ratio) and gold.terms == terms)
    if len(terms) != len(gold.terms) or not all(terms) or not all(gold.terms):
        return Outcome.WRONG
    return _decided(
        all(
            are_equal(multiply(ours, terms[0]), multiply(theirs, gold.terms[0]))
            for ours, theirs in zip(gold.terms, terms, strict=True)
        )
    )


def _is_time(gold: Ratio) -> bool:
    """Return whether it is a time of day or a duration: ratios are not written 12:30 or 8:05."""
    time = _TIME.fullmatch(gold.text)
    return time is not None and (time[2][0] == "0" or math.gcd(int(time[1]), int(time[2])) > 1)


def _same_set(gold: Set, answer: Node, rules: Rules) -> Outcome:
    ours = _distinct(gold.items, rules)
    if _are_named(gold.items) and (found := _same_assignments(gold.items, answer, rules)) is not None:
        return found
    if isinstance(answer, Tuple):
        if gold.text.startswith("\\{"):
            return match(ours[0], answer, rules) if len(ours) == 1 else Outcome.WRONG
        return _allmatch(gold.items, answer.items, rules)
    if not isinstance(answer, Set):
        if len(ours) == 1:
            return match(ours[0], answer, rules)
        return Outcome.UNREADABLE if isinstance(answer, Opaque) else Outcome.WRONG
    if gold.text.startswith("\\{") and len(_letters_of(answer.items)) > 1:
        return Outcome.WRONG
    theirs = _distinct(answer.items, rules)
    if len(ours) != len(theirs):
        return Outcome.WRONG
    worst = Outcome.RIGHT
    left = list(theirs)
    for item in ours:
        outcomes = [match(item, candidate, rules) for candidate in left]
        if Outcome.RIGHT in outcomes:
            del left[outcomes.index(Outcome.RIGHT)]
        elif Outcome.OPEN in outcomes:
            worst = Outcome.OPEN
        else:
            return Outcome.UNREADABLE if Outcome.UNREADABLE in outcomes else Outcome.WRONG
    return worst


def _same_assignments(golds: tuple[Node, ...], answer: Node, rules: Rules) -> Outcome | None:
    """Compare x = 1, y = 2: by name, in any order; or as a point, in the order of the names."""
    ours = {item.name: item.body for item in golds if isinstance(item, Named)}
    if len(ours) != len(golds):
        return None
    if isinstance(answer, Set) and _are_named(answer.items):
        theirs = {item.name: item.body for item in answer.items if isinstance(item, Named)}
        if theirs.keys() != ours.keys() or len(theirs) != len(answer.items):
            return Outcome.WRONG
        return _allmatch(tuple(ours.values()), tuple(theirs[name] for name in ours), rules)
    ordered = tuple(ours[name] for name in sorted(ours))
    if isinstance(answer, Tuple):
        return _allmatch(ordered, answer.items, rules)
    if isinstance(answer, Set) and not any(isinstance(item, Named) for item in answer.items):
        return _allmatch(ordered, answer.items, rules) if not answer.text.startswith("\\{") else Outcome.WRONG
    return Outcome.UNREADABLE if isinstance(answer, Opaque) else Outcome.WRONG


def _same_tuple(gold: Tuple, answer: Node, rules: Rules) -> Outcome:
    if isinstance(answer, Tuple):
        if (gold.opening, gold.closing) != (answer.opening, answer.closing) and len(gold.items) == 2:
            return Outcome.WRONG
        return _allmatch(gold.items, answer.items, rules)
    if isinstance(answer, Set) and not answer.text.startswith("\\{"):
        if _are_named(answer.items):
            names = {item.name: item.body for item in answer.items if isinstance(item, Named)}
            if len(names) != len(answer.items):
                return Outcome.WRONG
            return _allmatch(gold.items, tuple(names[name] for name in sorted(names)), rules)
        joined = all(joint not in answer.text for joint in ("or", "and"))
        return _allmatch(gold.items, answer.items, rules) if joined else Outcome.WRONG
    if isinstance(answer, Intervals):
        interval = read_bracketed_interval(gold.text, gold.text, force=True)
        return _decided(interval is not None and same_intervals(interval, answer))
    if isinstance(answer, Matrix):
        return (
            _allmatch(gold.items, tuple(cell for row in answer.rows for cell in row), rules)
            if all(len(row) == 1 for row in answer.rows)
            else Outcome.WRONG
        )
    return Outcome.UNREADABLE if isinstance(answer, Opaque) else Outcome.WRONG


def _same_as_intervals(gold: Intervals, answer: Node) -> Outcome:
    if isinstance(answer, Intervals):
        return _decided(same_intervals(gold, answer))
    if isinstance(answer, Tuple):
        interval = read_bracketed_interval(answer.text, answer.text, force=True)
        return _decided(interval is not None and same_intervals(gold, interval))
    return Outcome.UNREADABLE if isinstance(answer, Opaque) else Outcome.WRONG


def _same_matrix(gold: Matrix, answer: Node, rules: Rules) -> Outcome:
    if isinstance(answer, Tuple) and all(len(row) == 1 for row in gold.rows):
        return _allmatch(tuple(row[0] for row in gold.rows), answer.items, rules)
    if not isinstance(answer, Matrix):
        return Outcome.UNREADABLE if isinstance(answer, Opaque) else Outcome.WRONG
    if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
        return Outcome.WRONG
    return _allmatch(
        tuple(cell for row in gold.rows for cell in row), tuple(cell for row in answer.rows for cell in row), rules
    )


def _allmatch(golds: tuple[Node, ...], answers: tuple[Node, ...], rules: Rules) -> Outcome:
    if len(golds) != len(answers):
        return Outcome.WRONG
    outcomes = {match(gold, answer, rules) for gold, answer in zip(golds, answers, strict=True)}
    for outcome in (Outcome.WRONG, Outcome.UNREADABLE, Outcome.TOO_LARGE, Outcome.OPEN):
        if outcome in outcomes:
            return outcome
    return Outcome.RIGHT


def _distinct(items: tuple[Node, ...], rules: Rules) -> tuple[Node, ...]:
    """Return the items without repetitions."""
    strict = Rules(decimal_figures=0)
    distinct: list[Node] = []
    for item in items:
        if all(match(other, item, strict) is not Outcome.RIGHT for other in distinct):
            distinct.append(item)
    return tuple(distinct)


def _letters_of(items: tuple[Node, ...]) -> set[str]:
    """Return the names of items, with x_1 and x_2 counting as one."""
    return {item.name.partition("_")[0] for item in items if isinstance(item, Named)}


def _are_named(items: tuple[Node, ...]) -> bool:
    return all(isinstance(item, Named) for item in items)


def _decided(is_right: bool) -> Outcome:
    return Outcome.RIGHT if is_right else Outcome.WRONG
