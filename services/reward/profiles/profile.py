"""What every profile is: a decision, and the scale on which its credit becomes a score."""

import abc
import re
from dataclasses import dataclass

from services.reward.isolation.tasks import Task
from services.reward.item import Item
from services.reward.verdict import Judgement, Status

_UNJUDGED = frozenset({Status.GOLD_INVALID, Status.TIMEOUT, Status.OUT_OF_MEMORY, Status.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The scale: `reward_min` for nothing, `reward_max` for everything."""

    reward_max: float = 1.0
    """Score of a right answer in the right format."""
    reward_min: float = 0.0
    """Score of a wrong answer in a wrong format, and of what could not be judged."""
    format_weight: float = 0.0
    """Share of the score that the format earns, whatever the answer; from 0 to 1."""
    format_pattern: re.Pattern[str] = re.compile("")
    """What the whole response must match to have the format."""

    def score(self, judgement: Judgement, response: str) -> float:
        """The score of `response`, judged as `judgement`."""
        share = judgement.credit
        if self.format_weight and judgement.status not in _UNJUDGED:
            has_format = self.format_pattern.fullmatch(response) is not None
            share = (1 - self.format_weight) * share + self.format_weight * has_format
        return self.reward_min + (self.reward_max - self.reward_min) * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """What only a worker process can decide."""

    task: Task
    extracted: str = ""


Decision = Judgement | Undecided


class Profile(abc.ABC):
    """A named way to judge."""

    def __init__(self, *, name: str, description: str, scoring: Scoring) -> None:
        self.name = name
        self.description = description
        self.scoring = scoring

    @abc.abstractmethod
    def decide(self, item: Item) -> Decision:
        """Return the judgement of `item`, or who must decide. Pure, and bounded: milliseconds, whatever it holds."""
