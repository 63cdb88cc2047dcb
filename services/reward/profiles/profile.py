"""The base of all profiles: a decision, and the scale on which its credit becomes a score."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.verdict_status import UNJUDGED
from services.reward.isolation.tasks import FormatTask, Task
from services.reward.item import Item
from services.reward.profiles.format import Format
from services.reward.verdict import Finding

MAX_RESPONSE_CHARS = 65536
"""Characters at the end of a response that are searched: answers stand at the end, and this takes milliseconds."""
MAX_ANSWER_CHARS = 512
"""Maximum characters of an answer, because comparing longer ones takes long. A longer answer is TOO_LARGE, a longer
gold answer GOLD_INVALID."""
MAX_GOLDS = 64
"""An item with more gold answers is answered with GOLD_INVALID, except by custom verifiers and the remote service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The scale: `reward_min` for nothing right, `reward_max` for everything."""

    reward_max: float = 1.0
    """Score of a right answer in the right format."""
    reward_min: float = 0.0
    """Score of a wrong answer in a wrong format, and of an answer that could not be verified."""
    format_weight: float = 0.0
    """Share of the score that the format earns, whatever the answer; from 0 to 1."""
    format: Format | None = None
    """Decides whether a response has the format; set if the format has weight."""

    def check_format(self, finding: Finding, response: str) -> bool | FormatTask:
        """Return whether `response` earns the format's share, or the task that finds out."""
        if self.format is None or self.format_weight == 0 or finding.status in UNJUDGED:
            return False
        return self.format.check(response)

    def score(self, finding: Finding, *, has_format: bool) -> float:
        """Return the score of `finding`."""
        share = finding.credit
        if self.format_weight and finding.status not in UNJUDGED:
            share = (1 - self.format_weight) * share + self.format_weight * has_format
        return self.reward_min + (self.reward_max - self.reward_min) * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """A question that only a worker process can decide."""

    task: Task
    extracted: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """A question that the remote service decides."""


Decision = Finding | Undecided | Forwarded


class Profile(abc.ABC):
    """A named way to verify."""

    default_deadline_s: float | None = None
    """Limit of an item that asks for none, if it differs from the service's."""

    def __init__(self, *, name: str, description: str, scoring: Scoring) -> None:
        self.name = name
        self.description = description
        self.scoring = scoring

    @abc.abstractmethod
    def decide(self, item: Item) -> Decision:
        """Return the finding of `item`, or who must decide. Pure, and bounded to milliseconds, whatever it holds."""


class BoundedProfile(Profile):
    """A profile that reads a bounded part of a text: MAX_RESPONSE_CHARS and MAX_ANSWER_CHARS."""

    def _readable(self, golds: Sequence[str], max_chars: int) -> list[str]:
        """Return the golds of at most `max_chars` characters; none if they are too many to read in milliseconds."""
        if len(golds) > MAX_GOLDS:
            return []
        readable = [gold for gold in golds if len(gold) <= max_chars]
        return readable if sum(map(len, readable)) <= MAX_RESPONSE_CHARS else []
