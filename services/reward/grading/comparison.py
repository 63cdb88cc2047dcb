"""Symbolic comparison by math-verify. Runs in worker processes only: it may take any time and any memory.

Only LaTeX is parsed: math-verify's parser of plain expressions evaluates them as Python, and is not used.
"""

import logging
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

from services.reward.isolation.tasks import SymbolicTask, WorkerReply
from services.reward.verdict import Method, Status

_EXTRACTION = [LatexExtractionConfig()]

# math-verify warns that its own time limits are off; ours is the parent's, which kills.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def compare(task: SymbolicTask) -> WorkerReply:
    """Whether the answer equals one of the gold answers."""
    readable_gold = readable_answer = False
    for gold in task.golds:
        wanted = _parse(gold.text)
        if not wanted:
            continue
        readable_gold = True
        given = _parse(task.text if gold.use_text else task.body)
        if not given:
            continue
        readable_answer = True
        if gold.tolerance != "0" and _is_near(given[0], gold.value, gold.tolerance):
            return WorkerReply(status=Status.OK, credit=1.0, method=Method.SYMBOLIC)
        if verify(wanted, given, timeout_seconds=None):
            return WorkerReply(status=Status.OK, credit=1.0, method=Method.SYMBOLIC)
    if not readable_gold:
        return WorkerReply(status=Status.GOLD_INVALID)
    if not readable_answer:
        return WorkerReply(status=Status.UNPARSEABLE)
    return WorkerReply(status=Status.OK, method=Method.SYMBOLIC)


def _parse(latex: str) -> list[Any]:
    found: list[Any] = parse(f"${latex}$", _EXTRACTION, fallback_mode="no_fallback", parsing_timeout=None)
    return found


def _is_near(given: Any, value: str, tolerance: str) -> bool:
    if not isinstance(given, sympy.Expr) or given.free_symbols:
        return False
    number = sympy.N(given, 30)
    if not (number.is_real and number.is_finite):
        return False
    return bool(abs(number - sympy.Rational(value)) <= sympy.Rational(tolerance))
