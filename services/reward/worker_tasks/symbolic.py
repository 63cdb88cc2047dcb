"""Symbolic comparison of an answer with gold answers: plain algebra by its values, the rest by math-verify and sympy.

Runs in worker processes only: it may take any time and any memory. Only LaTeX is parsed: math-verify's parser of plain
expressions evaluates them as Python, and is not used.
"""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import sympy
from math_verify.grader import should_treat_as_complex

from penstock.verdict_status import Status
from services.reward.isolation.tasks import SymbolicGold, SymbolicTask, WorkerReply
from services.reward.verdict import Method
from services.reward.worker_tasks import latex_algebra, latex_math
from services.reward.worker_tasks.equality import are_equal, are_same_relations, distance
from services.reward.worker_tasks.expression import symbols_of
from services.reward.worker_tasks.latex_algebra import Collection, Plain
from services.reward.worker_tasks.latex_math import UnreadableError
from services.reward.worker_tasks.sympy_tree import NoTreeError, to_tree

_LOOSE_NUMBERS = re.compile(r"\d\s+\d|(?<![\\A-Za-z])[A-Za-z]\d|\d\s*_")
"""Two numbers side by side, which the parser adds; `x2`, which it reads as twice x; bases, which it drops."""
_DECIMAL = re.compile(r"-?\d*\.\d+")


class _GoldInvalidError(Exception):
    """The gold answer cannot be read."""


def compare(task: SymbolicTask) -> WorkerReply:
    """Return whether the answer equals one of the gold answers."""
    readable_gold = readable_answer = False
    for gold in task.golds:
        try:
            is_right = _is_right(gold, task.text if gold.use_text else task.body)
        except _GoldInvalidError:
            continue
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - sympy raises anything at all on what it cannot handle; another gold may do
            readable_gold = True
            continue
        readable_gold = readable_answer = True
        if is_right:
            return WorkerReply(status=Status.OK, credit=1.0, method=Method.SYMBOLIC)
    if not readable_gold:
        return WorkerReply(status=Status.GOLD_INVALID)
    if not readable_answer:
        return WorkerReply(status=Status.UNPARSEABLE)
    return WorkerReply(status=Status.OK, method=Method.SYMBOLIC)


def _is_right(gold: SymbolicGold, given: str) -> bool:
    if gold.value:
        return _is_near(given, Fraction(gold.value), Fraction(gold.tolerance))
    ours, theirs = latex_algebra.read(gold.text), latex_algebra.read(given)
    if ours is not None and theirs is not None:
        found = _compare_plain(ours, theirs)
        if found is not None:
            return found or _is_rounded(ours, given, gold.decimal_figures)
    is_real = not (should_treat_as_complex(gold.text) or should_treat_as_complex(given))
    try:
        wanted = latex_math.read(gold.text, is_real)
    except UnreadableError:
        raise _GoldInvalidError from None
    return latex_math.are_same(wanted, _read(given, is_real))


def _compare_plain(ours: Plain, theirs: Plain) -> bool | None:
    if isinstance(ours, Collection) and isinstance(theirs, Collection):
        return _compare_collections(ours, theirs)
    if isinstance(ours, Collection) or isinstance(theirs, Collection):
        return None
    if isinstance(ours, list) and isinstance(theirs, list):
        return are_same_relations(ours, theirs)
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return are_equal(ours, theirs)
    return False


def _compare_collections(ours: Collection, theirs: Collection) -> bool | None:
    """Compare item by item, in any order in braces; return None if that does not decide."""
    if ours.brackets != theirs.brackets or len(ours.items) != len(theirs.items):
        return None
    left = list(theirs.items)
    for item in ours.items:
        candidates = left if ours.brackets == "{}" else left[:1]
        found = [_compare_plain(item, candidate) for candidate in candidates]
        if True in found:
            del left[found.index(True)]
        elif None in found:
            return None
        else:
            return False
    return True


def _is_near(given: str, value: Fraction, tolerance: Fraction) -> bool:
    """Return whether `given` is one real number, within `tolerance` of `value`."""
    tree: Any = latex_algebra.read(given)
    if tree is None:
        found = _read(given, is_real=True)
        try:
            tree = to_tree(found)
        except NoTreeError:
            return _is_near_by_sympy(found, value, tolerance)
    if not isinstance(tree, tuple):
        return False
    gap = distance(tree, value)
    return gap is not None and bool(gap <= float(tolerance) or _is_at_most(gap, tolerance))


def _is_at_most(gap: Any, tolerance: Fraction) -> bool:
    return bool(gap * tolerance.denominator <= tolerance.numerator)


def _is_near_by_sympy(found: Any, value: Fraction, tolerance: Fraction) -> bool:
    if not isinstance(found, sympy.Expr) or found.free_symbols or found.has(*latex_math.UNEVALUATED):
        return False
    number = sympy.N(found, 80)
    if not (isinstance(number, sympy.Float | sympy.Rational) and number.is_finite):
        return False
    gap = abs(number - sympy.Rational(value.numerator, value.denominator))
    least = sympy.Rational(1, 10**60) * max(abs(value.numerator) // value.denominator, 1)
    return bool(gap <= max(sympy.Rational(tolerance.numerator, tolerance.denominator), least))


def _read(given: str, is_real: bool) -> Any:
    if _LOOSE_NUMBERS.search(given):
        raise UnreadableError("a number stands beside another or behind a letter, or has an index")
    return latex_math.read(given, is_real)


def _is_rounded(gold: Plain, given: str, figures: int) -> bool:
    """Return whether `given` is the irrational gold number, correctly rounded to at least `figures` figures."""
    if not isinstance(gold, tuple) or symbols_of(gold) or not figures or not _DECIMAL.fullmatch(given):
        return False
    decimal = Decimal(given)
    _, digits, exponent = decimal.as_tuple()
    if len(digits) < figures or not isinstance(exponent, int):
        return False
    gap = distance(gold, Fraction(decimal))
    return gap is not None and _is_at_most(gap, Fraction(1, 2) * Fraction(10) ** exponent)
