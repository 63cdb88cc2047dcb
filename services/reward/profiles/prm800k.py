r"""The profiles `slime_math`, `deepscaler` and `verl_geo3k`: three ways to find the answer, and one grader.

The grader is that of openai/prm800k (grader.py, MIT), which slime (rm_hub/math_utils.py) and MathRuler 0.1.0
(grader.py) both carry. An answer is right if it has the same spelling, decided here, or if sympy simplifies it to the
same value, decided by `services.reward.worker_tasks.prm800k_grader` in a worker process.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.verdict_status import Status
from services.reward.isolation.tasks import Prm800kTask, sendable
from services.reward.item import Item
from services.reward.profiles.hendrycks import normalise
from services.reward.profiles.profile import MAX_ANSWER_CHARS, MAX_RESPONSE_CHARS, BoundedProfile, Decision, Undecided
from services.reward.verdict import Finding, Method

_BRACE = re.compile(r"[{}]")


class Reading(NamedTuple):
    """Where a framework finds the texts it compares."""

    find_solution: Callable[[str], str | None]
    """Returns the part of a response that is searched, None if it has none."""
    find_answer: Callable[[str], str | None]
    """Returns the answer in that part, None if there is none."""
    find_gold: Callable[[str], str | None]
    """Returns the answer in a label, None if there is none."""
    strip_percent: bool
    """Whether a bare `%` is dropped before spellings are compared."""


class Prm800kProfile(BoundedProfile):
    """Right is what prm800k's grader calls right."""

    def __init__(self, *, reading: Reading, **settings: Any) -> None:
        """Take the settings of any profile, and where its framework finds the texts it compares."""
        super().__init__(**settings)
        self._reading = reading

    def decide(self, item: Item) -> Decision:
        """Return the finding of `item`, or the question that a worker process must decide."""
        readable = self._readable(item.golds, MAX_RESPONSE_CHARS)
        found = [self._reading.find_gold(gold) for gold in readable if gold]
        golds = [sendable(gold) for gold in found if gold is not None and len(gold) <= MAX_ANSWER_CHARS]
        if not golds:
            return Finding(status=Status.GOLD_INVALID)
        solution = self._reading.find_solution(item.response)
        answer = None if solution is None else self._reading.find_answer(solution[-MAX_RESPONSE_CHARS:])
        if answer is None:
            return Finding(status=Status.NO_ANSWER)
        answer = sendable(answer)
        if len(answer) > MAX_ANSWER_CHARS:
            return Finding(status=Status.TOO_LARGE, extracted=answer[:MAX_ANSWER_CHARS])
        given = normalise(answer, strip_percent=self._reading.strip_percent)
        if any(normalise(gold, strip_percent=self._reading.strip_percent) == given for gold in golds):
            return Finding(status=Status.OK, credit=1.0, extracted=answer, method=Method.EXACT)
        return Undecided(task=Prm800kTask(golds=tuple(golds), answer=answer), extracted=answer)


def _all(response: str) -> str | None:
    return response


def _after_thinking(response: str) -> str | None:
    """Return the text after the last `</think>`, else between the first two `###Response`."""
    _, mark, solution = response.rpartition("</think>")
    if mark:
        return solution
    parts = response.split("###Response", 2)
    return parts[1] if len(parts) > 1 else None


def _last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed`, if a brace follows at once and is closed."""
    start = text.rfind("\\boxed")
    return _braced(text, start + len("\\boxed")) if start >= 0 else None


def _last_braced_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{`, if it is closed, without blanks around it."""
    start = text.rfind("\\boxed{")
    content = _braced(text, start + len("\\boxed")) if start >= 0 else None
    return None if content is None else content.strip()


def _braced(text: str, start: int) -> str | None:
    if not text.startswith("{", start):
        return None
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start + 1 : brace.start()]
    return None


def _plain_or_boxed(gold: str) -> str | None:
    return _last_box(gold) if "\\boxed" in gold else gold


def _plain_or_boxed_not_fboxed(gold: str) -> str | None:
    return _last_box(gold) if "\\boxed" in gold or "\\fbox" in gold else gold


SLIME_MATH = Reading(_all, _last_box, _plain_or_boxed, strip_percent=False)
"""slime, rm_type `math`: rm_hub/math_utils.py, grade_answer_verl."""
DEEPSCALER = Reading(_after_thinking, _last_box, _plain_or_boxed_not_fboxed, strip_percent=False)
"""slime, rm_type `deepscaler`: rm_hub/deepscaler.py, get_deepscaler_rule_based_reward."""
VERL_GEO3K = Reading(_all, _last_braced_box, str, strip_percent=True)
"""verl, data source geometry3k: utils/reward_score/geo3k.py, acc_reward, which calls MathRuler."""
