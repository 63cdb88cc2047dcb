"""The profile `math_verify`: huggingface/Math-Verify 0.9.0 (Apache-2.0) with its defaults, in a worker process.

Both the gold answers and the response go through its own `parse`, so LaTeX in a gold answer needs its dollar signs or
box.
"""

from penstock.verdict_status import Status
from services.reward.isolation.tasks import MathVerifyTask, sendable
from services.reward.item import Item
from services.reward.profiles.profile import MAX_RESPONSE_CHARS, BoundedProfile, Decision, Undecided
from services.reward.verdict import Finding


class MathVerifyProfile(BoundedProfile):
    """Right is what math-verify's own extraction and comparison call right."""

    def decide(self, item: Item) -> Decision:
        """Return the question that a worker process must decide."""
        golds = tuple(sendable(gold) for gold in self._readable(item.golds, MAX_RESPONSE_CHARS) if gold)
        if not golds:
            return Finding(status=Status.GOLD_INVALID)
        if not item.response:
            return Finding(status=Status.NO_ANSWER)
        return Undecided(task=MathVerifyTask(golds=golds, response=sendable(item.response[-MAX_RESPONSE_CHARS:])))
