r"""Converts correct answers from the forms that data sets publish to the plain text that verifiers compare with.

    "5"  5  5.0  [5, "5.0"]  {"ground_truth": "5"}  "$5$"  "\\boxed{5}"  "Answer: \\boxed{5}"  "...<answer>5</answer>"
    "...<SOLUTION>5</SOLUTION>"  "...\n#### 5"

Invariant: an ambiguous value is rejected, never graded as something else.
"""

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_MATH = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_LABEL = re.compile(r"(?:the\s+)?(?:final\s+)?answer\s*(?:is\s*:?|[:=])\s*", re.IGNORECASE)
_TAG = re.compile(r"<(?P<tag>answer|SOLUTION)>(?P<inside>.*?)</(?P=tag)>", re.DOTALL)
_BOX = re.compile(r"\\boxed\s*\{")
_HASHED = re.compile(r"^####(?!#)[ \t]*(\S.*)$", re.MULTILINE)
"""Matches a line of GSM8K's answers."""


def read_golds(cell: Any) -> tuple[str, ...]:
    """Return the correct answers in a cell, each of which is accepted.

    Args:
        cell: Text, a number, a struct with `ground_truth`, or a list of texts and numbers.

    Raises:
        ValueError: it is none of these, is empty, or holds several boxes, tags such as `<answer>` or lines with `####`.
    """
    value = cell.get("ground_truth") if isinstance(cell, Mapping) else cell
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError("an empty list; want the correct answer as text")
    return tuple(_gold(each) for each in values)


def read_solution(cell: Any) -> tuple[str, ...]:
    """Return the correct answer that a worked solution marks with a tag, a box or a last line with `####`.

    Raises:
        ValueError: it is no text, or has no mark or several.
    """
    is_marked = isinstance(cell, str) and (
        _TAG.search(cell)
        or any(_inside(cell, match.end()) is not None for match in _BOX.finditer(cell))
        or _last_line(cell.strip()) is not None
    )
    if not is_marked:
        found = "text" if isinstance(cell, str) and cell else _kind(cell)
        raise ValueError(
            f"{found} in which no <answer>, <SOLUTION>, \\boxed{{}} or last line with #### marks the correct answer; "
            "mark it, or name the column of answers with --data.answer_column=..."
        )
    return read_golds(cell)


def _gold(value: Any) -> str:
    match value:
        case bool():
            raise ValueError(f"{str(value).lower()}, a truth value; write the answer as text, such as 'yes' or 'no'")
        case int():
            return str(value)
        case float() if not math.isfinite(value):
            raise ValueError(f"{value}, which is no answer")
        case float() | Decimal():
            return _plain(Decimal(repr(value)) if isinstance(value, float) else value)
        case str() if gold := _bare(value):
            return gold
    raise ValueError(f"{_kind(value)}; want the correct answer as text")


def _plain(number: Decimal) -> str:
    """Format without exponent and trailing zeros: a column of integers with a missing value becomes one of floats."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _bare(text: str) -> str:
    """Strip working, label, box and math delimiters from an answer."""
    text = text.strip()
    if tagged := list(_TAG.finditer(text)):
        if len(tagged) > 1:
            raise ValueError(f"{len(tagged)} <{tagged[0]['tag']}>; want one answer, or a list of those that count")
        return _bare(tagged[0]["inside"])
    boxes = [_inside(text, match.end()) for match in _BOX.finditer(text)]
    if len(boxes) > 1:
        raise ValueError(f"{len(boxes)} boxes; want one answer, or a list of those that count")
    if boxes and boxes[0] is not None:
        return _bare(boxes[0])
    if (last := _last_line(text)) is not None:
        return _bare(last)
    if label := _LABEL.match(text):
        return _bare(text[label.end() :])
    for opening, closing in _MATH:
        inner = text[len(opening) : -len(closing)]
        is_around = text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing)
        if is_around and opening not in inner and closing not in inner:
            return _bare(inner)
    return text


def _last_line(text: str) -> str | None:
    """Return what `####` marks on the last line; None if it marks nothing there, as in a text with headings."""
    lines = list(_HASHED.finditer(text))
    if not lines or lines[-1].end() != len(text):
        return None
    if len(lines) > 1:
        raise ValueError(f"{len(lines)} lines with ####; want one answer, or a list of those that count")
    return lines[0][1]


def _inside(text: str, start: int) -> str | None:
    """Return the content of the brace that opened before `start`; None if it is never closed."""
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index]
    return None


def _kind(value: Any) -> str:
    return "nothing" if value is None else "empty text" if isinstance(value, str) else type(value).__name__
