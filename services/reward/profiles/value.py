r"""The profiles `math` and `geo3k`: the last box, compared by value."""

import re
from fractions import Fraction

from services.reward.answers.comparison import Side, compare
from services.reward.answers.extraction import extract_answer
from services.reward.isolation.tasks import SymbolicGold, SymbolicTask
from services.reward.item import Item
from services.reward.profiles.profile import Decision, Profile, Scoring, Undecided
from services.reward.verdict import Judgement, Method, Status

_SURROGATE = re.compile("[\ud800-\udfff]")


class ValueProfile(Profile):
    """Right is what has the value of a gold answer."""

    def __init__(
        self,
        *,
        name: str,
        description: str,
        scoring: Scoring,
        tolerance: Fraction,
        max_response_chars: int,
        max_answer_chars: int,
    ) -> None:
        """`tolerance`: largest |answer - gold| that is right for a gold answer that is a rounded label."""
        super().__init__(name=name, description=description, scoring=scoring)
        self._tolerance = tolerance
        self._max_response_chars = max_response_chars
        self._max_answer_chars = max_answer_chars

    def decide(self, item: Item) -> Decision:
        """Return the judgement of `item`, or the question that a worker process must decide."""
        valid = [Side.of(gold) for gold in item.golds if len(gold) <= self._max_answer_chars]
        valid = [gold for gold in valid if gold.answer.body]
        if not valid:
            return Judgement(status=Status.GOLD_INVALID)
        extracted = extract_answer(item.response, max_chars=self._max_response_chars)
        if extracted is None:
            return Judgement(status=Status.NO_ANSWER)
        extracted = _SURROGATE.sub("\ufffd", extracted)  # which could not travel
        if len(extracted) > self._max_answer_chars:
            return Judgement(status=Status.TOO_LARGE, extracted=extracted[: self._max_answer_chars])
        side = Side.of(extracted)
        if not side.answer.body:
            return Judgement(status=Status.UNPARSEABLE, extracted=extracted)
        undecided: list[SymbolicGold] = []
        unreadable = False
        method = Method.EXACT
        for gold in valid:
            found = compare(gold, side, self._tolerance)
            if isinstance(found, SymbolicGold):
                undecided.append(found)
                continue
            equal, method = found
            if equal:
                return Judgement(status=Status.OK, credit=1.0, extracted=extracted, method=method)
            unreadable |= equal is None
        if undecided:
            task = SymbolicTask(golds=tuple(undecided), body=side.answer.body, text=side.answer.text)
            return Undecided(extracted=extracted, task=task)
        if unreadable:
            return Judgement(status=Status.UNPARSEABLE, extracted=extracted)
        return Judgement(status=Status.OK, extracted=extracted, method=method)
