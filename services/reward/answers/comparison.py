r"""The comparison of two answers: cheap and certain first, and what is left as a question for a worker process.

Pure and bounded: nothing here takes more than milliseconds, whatever the answers hold. Tier 1 compares text and exact
rationals; tier 2 compares choices and words; what neither decides goes to math-verify, in a process that can be killed.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from services.reward.answers.normalisation import Answer, normalise
from services.reward.answers.number import TooLargeError, is_written_decimal, parse_rational
from services.reward.isolation.tasks import SymbolicGold
from services.reward.verdict import Method

_CHOICE = re.compile(r"[A-Z]")
_WORDS = re.compile(r"[A-Za-z]{4,}(?: [A-Za-z]+)*|[A-Za-z]+(?: [A-Za-z]+)+")
# What is no number although it may have the value of one: relations, and calculations left to the reader.
_NOT_A_NUMBER = re.compile(
    r"[=<>!\ufffd]|\\(?:n?eq?|[lg]eq?|approx|cong|sum|prod|int|lim|binom|bmod|pmod|Gamma|det|max|min)(?![A-Za-z])"
    r"|[A-Za-z]{2,}\(|(?<![\\A-Za-z])[A-Za-z]{4,}"
)


@dataclass(frozen=True, slots=True)
class Side:
    """A gold answer or a response's, with its value where it is a plain number."""

    answer: Answer
    value: Fraction | None
    too_large: bool

    @classmethod
    def of(cls, text: str) -> "Side":
        answer = normalise(text)
        try:
            return cls(answer, parse_rational(answer.body), too_large=False)
        except TooLargeError:
            return cls(answer, None, too_large=True)


def compare(gold: Side, side: Side, tolerance: Fraction) -> tuple[bool | None, Method] | SymbolicGold:
    """Whether the two are the same and what decided; None if the answer cannot be read; else the open question."""
    ours, theirs = gold.answer, side.answer
    one_letter = len(ours.name) == len(theirs.name) == 1
    if one_letter and ours.name != theirs.name:
        return False, Method.EXACT
    if ours.unit and theirs.unit and ours.unit != theirs.unit:
        return False, Method.EXACT
    if _squeeze(ours.body) == _squeeze(theirs.body):
        return True, Method.EXACT
    if _CHOICE.fullmatch(ours.body) and re.fullmatch(r"\(?[A-Z]\)?\.?", theirs.body):
        return theirs.body.strip("().") == ours.body, Method.STRUCTURE
    if _WORDS.fullmatch(ours.body):
        return " ".join(theirs.body.split()).casefold() == ours.body.casefold(), Method.STRUCTURE
    limit = tolerance if is_written_decimal(ours.body) else Fraction(0)
    if gold.value is None:
        if side.too_large and not gold.too_large:
            return None, Method.UNSPECIFIED
        use_text = bool(ours.name) and not theirs.name and "=" in theirs.text
        return SymbolicGold(text=ours.text if use_text else ours.body, use_text=use_text, value="", tolerance="0")
    if side.value is not None:
        values = [side.value]
        if theirs.unit == "%" and not ours.unit:
            values.append(side.value / 100)
        return any(abs(value - gold.value) <= limit for value in values), Method.EXACT
    if side.too_large or _NOT_A_NUMBER.search(theirs.body):
        return None, Method.UNSPECIFIED
    return SymbolicGold(text=ours.body, use_text=False, value=str(gold.value), tolerance=str(limit))


def _squeeze(text: str) -> str:
    """Without spaces, except where they end a command's name."""
    return re.sub(r"(?<![A-Za-z]) | (?![A-Za-z])", "", text)
