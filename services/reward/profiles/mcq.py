"""The profile `mcq`: which letter a response chooses.

Gold answers are letters; other gold answers are the text or the value of the right choice, and also right. A choice
counts where it stands last: in a box, in `<answer>`, after `Answer:`, or in words. Several letters are wrong, unless
the gold choice's text has them, and so is the right letter beside another choice's value.
"""

from fractions import Fraction
from typing import Any

from penstock.verdict_status import Status
from services.reward.exact.comparison import Outcome, Rules, Side, compare
from services.reward.exact.contradiction import contradicts
from services.reward.exact.extraction import Forms, extract_answer
from services.reward.exact.nodes import Chain, Intervals, Matrix, Named, Node, Ratio, Scalar, Set, Tuple
from services.reward.exact.text.brackets import squeeze
from services.reward.exact.text.letters import find_choices, has_letters, names_another, read_letter
from services.reward.exact.text.normalisation import normalise
from services.reward.isolation.tasks import sendable
from services.reward.item import Item
from services.reward.profiles.profile import MAX_ANSWER_CHARS, MAX_RESPONSE_CHARS, Decision
from services.reward.profiles.value import ValueProfile
from services.reward.verdict import Finding, Method

_RULES = Rules()
_VALUES = (Scalar, Ratio, Intervals, Matrix, Set, Tuple)
"""Kinds of answers that are not texts, and are therefore compared when they stand beside a letter."""


class McqProfile(ValueProfile):
    """Right is the gold letter; for a response without a letter, the gold choice's value."""

    def __init__(self, *, answers_in: Forms = Forms.WORDS, **settings: Any) -> None:
        """Take the settings of any profile, and `answers_in`: the forms in which an answer counts."""
        super().__init__(tolerance=Fraction(0), answers_in=answers_in, **settings)

    def decide(self, item: Item) -> Decision:
        """Return the finding of `item`, or the question that a worker process must decide."""
        letters: set[str] = set()
        texts: list[Side] = []
        rests: set[str] = set()
        for gold in self._readable(item.golds, MAX_ANSWER_CHARS):
            letter, text = read_letter(gold) or ("", gold)
            letters |= {letter} - {""}
            rests.add(squeeze(normalise(text)))
            if text.strip() and not (side := Side.of(text)).is_blank:
                texts.append(side)
        if not letters:
            return Finding(status=Status.GOLD_INVALID)
        extracted = extract_answer(
            item.response,
            max_chars=MAX_RESPONSE_CHARS,
            forms=self._answers_in,
            stated=find_choices,
            contradicts=_chooses_otherwise,
        )
        if extracted is None:
            return Finding(status=Status.NO_ANSWER)
        if not extracted.isascii():
            extracted = sendable(extracted)
        if len(extracted) > MAX_ANSWER_CHARS:
            return Finding(status=Status.TOO_LARGE, extracted=extracted[:MAX_ANSWER_CHARS])
        chosen = read_letter(extracted)
        if chosen is None:
            if not texts or has_letters(extracted):
                return Finding(status=Status.UNPARSEABLE, extracted=extracted)
            return self._judge(texts, extracted)
        letter, rest = chosen
        if names_another(letter, rest) and squeeze(normalise(rest)) not in rests:
            return Finding(status=Status.UNPARSEABLE, extracted=extracted)
        is_right = letter in letters and not _is_another(rest, texts)
        return Finding(status=Status.OK, credit=float(is_right), extracted=extracted, method=Method.STRUCTURE)


def _chooses_otherwise(first: str, later: str) -> bool:
    """Return whether the second answer is a different choice; a letter takes precedence over a value."""
    one, other = read_letter(first), read_letter(later)
    if other is not None:
        return one is None or one[0] != other[0]
    return has_letters(later) or (one is None and contradicts(first, later))


def _is_another(rest: str, texts: list[Side]) -> bool:
    """Return whether a value beside a letter differs from all of the right choice's."""
    values = [text for text in texts if isinstance(_body(text.node), _VALUES)]
    return bool(rest and values) and _has_another(Side.of(rest), values)


def _has_another(beside: Side, values: list[Side]) -> bool:
    """Return whether `beside`, or any part of it, is a value outside `values`."""
    if any(compare(value, beside, _RULES) is Outcome.RIGHT for value in values):
        return False
    match beside.node:
        case Named(body=body):
            parts: tuple[Node, ...] = (body,)
        case Set(items=parts) | Tuple(items=parts) | Chain(parts=parts):
            pass
        case _:
            return isinstance(beside.node, _VALUES)
    return any(_has_another(Side(text=part.text, node=part), values) for part in parts)


def _body(node: Node) -> Node:
    return node.body if isinstance(node, Named) else node
