r"""prm800k's grader, from the point where the spellings differ. Runs in worker processes only.

The decisions are those of openai/prm800k (prm800k/grading/grader.py, MIT) as slime (rm_hub/math_utils.py,
`grade_answer_sympy`) and MathRuler 0.1.0 (`grade_answer`) carry it. They pass any text of the model to sympy's parser,
which evaluates Python; here only text that passes `_is_arithmetic` reaches it.
"""

import builtins
import keyword
import logging
import re
from types import BuiltinFunctionType
from typing import Any

import sympy
from pylatexenc.latex2text import LatexNodes2Text
from sympy.parsing import sympy_parser

from penstock.verdict_status import Status
from services.reward.isolation.tasks import Prm800kTask, WorkerReply
from services.reward.profiles.hendrycks import unwrap_text
from services.reward.verdict import Method

_UNITS = [
    re.compile(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?")
    for unit in (
        *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour"),
        *("day", "week", "month", "year", "foot", "feet", "inch", "yard"),
    )
]
_WORDS = (
    ("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , "),
    ("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12"),
)  # fmt: skip
_SIGNS = (("√", "sqrt"), ("π", "pi"), ("∞", "inf"), ("∪", "U"), ("·", "*"), ("×", "*"))
_THOUSANDS = re.compile(r"(\d),(\d\d\d)($|\D)")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_HANGS = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")
_BRACKETS = frozenset("()[]")
_MAX_LETTERS = 2
"""Maximum number of different letters in an expression, roots apart; one with more is taken for words."""

_TOKEN = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+|(?P<name>[^\W\d]\w*)|[-+*/^!(),\s]")
_NAMESPACE = {"__builtins__": {}} | {name: getattr(sympy, name) for name in sympy.__all__}
_ALLOWED = frozenset({"sqrt", "ln", "csc", "re", "im", "frac", "pi", "oo", "zoo", "nan"})
_FORBIDDEN = (
    frozenset(
        {
            *_NAMESPACE,
            *keyword.kwlist,
            *(name for name, value in vars(builtins).items() if isinstance(value, BuiltinFunctionType)),
        }
    )
    - _ALLOWED
)
"""Names that are not variables."""
_TRANSFORMATIONS = (
    *sympy_parser.standard_transformations,
    sympy_parser.implicit_multiplication_application,
)
_LATEX = LatexNodes2Text()
# It warns about LaTeX that it reads only in part.
logging.getLogger("pylatexenc").setLevel(logging.CRITICAL)


def grade(task: Prm800kTask) -> WorkerReply:
    """Return whether the answer equals one of the gold answers."""
    given = _normalise(task.answer)
    right = any(_is_same(_normalise(gold), given) for gold in task.golds)
    return WorkerReply(status=Status.OK, credit=float(right), method=Method.SYMBOLIC)


def _normalise(text: str) -> str:
    text = unwrap_text(text)
    for old, new in _WORDS:
        text = text.replace(old, new)
    for unit in _UNITS:
        text = unit.sub("", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if (integer := _integer(text)) is not None:
        text = str(round(integer))
    if "\\" in text:
        text = _plain(text)
    text = re.sub("- *", "-", text)
    text = re.sub("([0-9]) +([0-9])", r"\1+\2", text)  # 7 3/4 is 7+3/4
    text = re.sub("[ {}]", "", text).lower()
    if _integer(_without_thousands(text)) is not None:
        text = str(int(float(text.replace(",", ""))))
    return text


def _plain(latex: str) -> str:
    try:
        fractions = latex.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac")
        text: str = _LATEX.latex_to_text(fractions.replace("\\frac", " \\frac"))  # which keeps mixed numbers apart
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - what it cannot read stays LaTeX
        return latex
    for old, new in _SIGNS:
        text = text.replace(old, new)
    return text.strip()


def _integer(text: str) -> float | None:
    """Return the number in `text`, if it is practically an integer."""
    try:
        value = float(text)
        return value if abs(value - round(value)) <= 1e-7 else None
    except (ValueError, OverflowError):
        return None


def _without_thousands(text: str) -> str:
    while True:
        fewer = _THOUSANDS.sub(r"\1\2\3", text)
        if fewer == text:
            return text
        text = fewer


def _is_same(gold: str, given: str) -> bool:
    if gold == given:
        return True
    if not given:
        return False
    golds, givens = _elements(gold), _elements(given)
    if len(golds) > 1 and (gold[0] != given[0] or gold[-1] != given[-1]):
        return False
    return len(golds) == len(givens) and all(map(_is_same_element, golds, givens))


def _elements(text: str) -> list[str]:
    """Return the elements of a tuple or interval, else `text` itself."""
    text = _without_thousands(text)
    if not text:
        return []
    if len(text) > 2 and {text[0], text[-1]} <= _BRACKETS and not _BRACKETS & set(text[1:-1]):
        return [element.strip() for element in text[1:-1].split(",")]
    return [text]


def _is_same_element(gold: str, given: str) -> bool:
    if _FRACTION.search(gold) and _FRACTION.search(given):
        return gold == given  # an unreduced fraction is wrong
    if (_integer(_without_thousands(gold)) is None) != (_integer(_without_thousands(given)) is None):
        return False  # an integer must be written as one
    difference = f"({gold})-({given})"
    if not (_is_worth_trying(difference) and _is_arithmetic(difference)):
        return False
    try:
        parsed: Any = sympy_parser.parse_expr(
            difference.replace("^", "**"), global_dict=dict(_NAMESPACE), transformations=_TRANSFORMATIONS
        )
        return bool(sympy.simplify(parsed) == 0)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - sympy raises anything at all on text that it cannot handle
        return False


def _is_worth_trying(text: str) -> bool:
    letters = {char for char in text.replace("sqrt", "").replace("frac", "") if char.isalpha()}
    return len(letters) <= _MAX_LETTERS and not _HANGS.search(text)


def _is_arithmetic(text: str) -> bool:
    """Return whether `text` holds only numbers, operators, brackets, variables and a few functions.

    No Python name, attribute or string can occur in it, so evaluating it only computes.
    """
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            return False
        name = token["name"]
        if name is not None and (name in _FORBIDDEN or "__" in name):
            return False
        position = token.end()
    return True
