r"""The profiles `math` and `geo3k`: the final answer, compared by value.

`answers_in` decides where the answer may stand: `box`, `marks` (`geo3k`) or `words` (`math`); see
`services.reward.exact.extraction`. An answer is right if it has exactly the value of a gold answer. Two settings widen
that:

- `decimal_figures` (4; both profiles). A gold answer in exact form, such as `3\sqrt{2}`, `\frac{16}{3}` or `8\pi`, also
  accepts the decimal that it rounds to, from this many significant figures on: 4.243 is right, 4.24 and 4.242 are not.
  Gold answers written as an integer or a decimal do not: 62.5 takes 125/2, but not 62.4. 0 turns it off.
- `tolerance` (0.05 in `geo3k`, 0 in `math`). A gold answer that is a rounded label takes |answer - gold| <= tolerance.
  A rounded label is a plain number written with a decimal point (8.5, 20.0), or a plain integer of at least 100 in
  absolute value (270). The tolerance never applies to smaller integers, to fractions, radicals, multiples of pi or
  anything else that is not one plain number, except to such numbers inside a tuple or set. 0 is strict.

Unfinished work is not an answer: uncomputed sums of rationals (`2+3`, `\frac{180-40}{2}`), big operators and unsolved
equations are not right. Work with its result is (`2+3=5`), if both sides agree. Products, powers, fractions and roots
are ways to write a number.
"""

from fractions import Fraction
from typing import Any

from penstock.verdict_status import Status
from services.reward.exact.comparison import Outcome, Rules, Side, compare, is_structural
from services.reward.exact.contradiction import contradicts
from services.reward.exact.extraction import Forms, extract_answer
from services.reward.exact.nodes import Equation, Named, Scalar
from services.reward.exact.numbers.algebra import as_rational
from services.reward.isolation.tasks import SymbolicGold, SymbolicTask, sendable
from services.reward.item import Item
from services.reward.profiles.profile import MAX_ANSWER_CHARS, MAX_RESPONSE_CHARS, BoundedProfile, Decision, Undecided
from services.reward.verdict import Finding, Method


class ValueProfile(BoundedProfile):
    """Right is the value of a gold answer."""

    def __init__(
        self,
        *,
        tolerance: Fraction,
        decimal_figures: int = 4,
        answers_in: Forms = Forms.MARKS,
        **settings: Any,
    ) -> None:
        """Take the settings of any profile, and those of this one.

        Args:
            tolerance: Largest right |answer - gold| for a rounded label.
            decimal_figures: Significant figures from which on a decimal is right for an exact form; 0: never.
            answers_in: The forms in which an answer counts.
            settings: As for any profile.
        """
        super().__init__(**settings)
        self._answers_in = answers_in
        self._rules = Rules(tolerance=tolerance, decimal_figures=decimal_figures)

    def decide(self, item: Item) -> Decision:
        """Return the finding of `item`, or the question that a worker process must decide."""
        golds = [Side.of(gold) for gold in self._readable(item.golds, MAX_ANSWER_CHARS)]
        golds = [gold for gold in golds if not gold.is_blank]
        if not golds:
            return Finding(status=Status.GOLD_INVALID)
        extracted = extract_answer(
            item.response, max_chars=MAX_RESPONSE_CHARS, forms=self._answers_in, contradicts=contradicts
        )
        if extracted is None:
            return Finding(status=Status.NO_ANSWER)
        return self._judge(golds, extracted)

    def _judge(self, golds: list[Side], extracted: str) -> Decision:
        """Compare an answer with gold answers."""
        if not extracted.isascii():
            extracted = sendable(extracted)
        if len(extracted) > MAX_ANSWER_CHARS:
            return Finding(status=Status.TOO_LARGE, extracted=extracted[:MAX_ANSWER_CHARS])
        answer = Side.of(extracted)
        if answer.is_blank:
            return Finding(status=Status.UNPARSEABLE, extracted=extracted)
        outcomes: dict[Outcome, list[Side]] = {}
        for gold in golds:
            outcome = compare(gold, answer, self._rules)
            if outcome is Outcome.RIGHT:
                return Finding(status=Status.OK, credit=1.0, extracted=extracted, method=_method(gold))
            outcomes.setdefault(outcome, []).append(gold)
        if Outcome.OPEN in outcomes:
            task = _question(outcomes[Outcome.OPEN], answer, self._rules.decimal_figures)
            return Undecided(extracted=extracted, task=task)
        if Outcome.WRONG in outcomes:
            return Finding(status=Status.OK, extracted=extracted, method=_method(outcomes[Outcome.WRONG][0]))
        status = Status.TOO_LARGE if Outcome.TOO_LARGE in outcomes else Status.UNPARSEABLE
        return Finding(status=status, extracted=extracted)


def _method(gold: Side) -> Method:
    return Method.STRUCTURE if is_structural(gold) else Method.EXACT


def _question(golds: list[Side], answer: Side, decimal_figures: int) -> SymbolicTask:
    """Return the task for a worker: whether `answer` equals one of `golds`."""
    body = answer.node.body.text if isinstance(answer.node, Named) else answer.node.text
    questions = []
    for gold in golds:
        named = gold.node if isinstance(gold.node, Named) else None
        value = None
        if isinstance(gold.node, Scalar):
            value = as_rational(gold.node.number.value)
        questions.append(
            SymbolicGold(
                text=gold.node.text if named is None else named.body.text,
                use_text=isinstance(gold.node, Equation),
                value="" if value is None else str(value),
                tolerance="0",
                decimal_figures=decimal_figures,
            )
        )
    return SymbolicTask(golds=tuple(questions), body=body, text=answer.node.text)
