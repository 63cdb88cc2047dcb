r"""The decision on one response: cheap and certain first, and what is left as a question for a worker process.

Pure and bounded: nothing here takes more than milliseconds, whatever the response holds. Tier 1 compares text and exact
rationals; tier 2 compares choices and words; what neither decides goes to math-verify, in a process that can be killed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from services.reward.exact import TooLargeError, is_written_decimal, parse_rational
from services.reward.extraction import extract_answer
from services.reward.normalisation import Answer, normalise
from services.reward.profiles import Profile
from services.reward.symbolic_task import SymbolicGold, SymbolicTask
from services.reward.verdict import Judgement, Method, Status

_SURROGATE = re.compile("[\ud800-\udfff]")
_CHOICE = re.compile(r"[A-Z]")
_WORDS = re.compile(r"[A-Za-z]{4,}(?: [A-Za-z]+)*|[A-Za-z]+(?: [A-Za-z]+)+")
# What is no number although it may have the value of one: relations, and calculations left to the reader.
_NOT_A_NUMBER = re.compile(
    r"[=<>!\ufffd]|\\(?:n?eq?|[lg]eq?|approx|cong|sum|prod|int|lim|binom|bmod|pmod|Gamma|det|max|min)(?![A-Za-z])"
    r"|[A-Za-z]{2,}\(|(?<![\\A-Za-z])[A-Za-z]{4,}"
)


@dataclass(frozen=True, slots=True)
class _Side:
    """A gold answer or a response's, with its value where it is a plain number."""

    answer: Answer
    value: Fraction | None
    too_large: bool

    @classmethod
    def of(cls, text: str) -> "_Side":
        answer = normalise(text)
        try:
            return cls(answer, parse_rational(answer.body), too_large=False)
        except TooLargeError:
            return cls(answer, None, too_large=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """What only a worker process can decide."""

    extracted: str
    task: SymbolicTask


def judge(profile: Profile, golds: Sequence[str], response: str) -> Judgement | Undecided:
    """Return the judgement of `response`, or the question that a worker process must decide."""
    valid = [_Side.of(gold) for gold in golds if len(gold) <= profile.max_answer_chars]
    valid = [gold for gold in valid if gold.answer.body]
    if not valid:
        return Judgement(status=Status.GOLD_INVALID)
    extracted = extract_answer(response, max_chars=profile.max_response_chars)
    if extracted is None:
        return Judgement(status=Status.NO_ANSWER)
    extracted = _SURROGATE.sub("\ufffd", extracted)  # which could not travel
    if len(extracted) > profile.max_answer_chars:
        return Judgement(status=Status.TOO_LARGE, extracted=extracted[: profile.max_answer_chars])
    side = _Side.of(extracted)
    if not side.answer.body:
        return Judgement(status=Status.UNPARSEABLE, extracted=extracted)
    undecided: list[SymbolicGold] = []
    unreadable = False
    method = Method.EXACT
    for gold in valid:
        found = _compare(gold, side, profile.tolerance)
        if isinstance(found, SymbolicGold):
            undecided.append(found)
            continue
        equal, method = found
        if equal:
            return Judgement(status=Status.OK, correct=True, extracted=extracted, method=method)
        unreadable |= equal is None
    if undecided:
        task = SymbolicTask(golds=tuple(undecided), body=side.answer.body, text=side.answer.text)
        return Undecided(extracted=extracted, task=task)
    if unreadable:
        return Judgement(status=Status.UNPARSEABLE, extracted=extracted)
    return Judgement(status=Status.OK, extracted=extracted, method=method)


def _compare(gold: _Side, side: _Side, tolerance: Fraction) -> tuple[bool | None, Method] | SymbolicGold:
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
