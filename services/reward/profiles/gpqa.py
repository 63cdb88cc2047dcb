r"""The profile `gpqa`: which letter a response chooses.

The decisions are those of slime (rm_hub/gpqa.py, `compute_gpqa_reward`, Apache-2.0) with only `correct_answer` as
metadata: a gold answer of one letter from A to J is the right choice, any other is its text. So a label C with the
metadata {"correct_answer": "a proton"} is here the gold answers "C" and "a proton".
"""

import re
import string

from penstock.verdict_status import Status
from services.reward.item import Item
from services.reward.profiles.profile import MAX_RESPONSE_CHARS, BoundedProfile, Decision
from services.reward.verdict import Finding, Method

_LETTERS = frozenset(string.ascii_uppercase[:10])
# The first match of each counts, if its letter is valid; blanks never backtrack, which would take quadratic time.
_STATEMENTS = (
    re.compile(r"(?:answer|option|choice)\s*+(?:(?:is|:)\s*+)?([A-Z])", re.IGNORECASE),
    re.compile(r"([A-Z])\s*+is\s*+(?:the\s*+)?correct", re.IGNORECASE),
    re.compile(r"final\s*+(?:answer|option)\s*+(?:(?:is|:)\s*+)?([A-Z])", re.IGNORECASE),
)
_LONE_LETTER = re.compile(r"\b[A-Z]\b")


class GpqaProfile(BoundedProfile):
    """Right is the gold letter; for a response without a letter, a text that contains the gold answer's."""

    def decide(self, item: Item) -> Decision:
        """Return the finding of `item`."""
        golds = [gold.strip() for gold in self._readable(item.golds, MAX_RESPONSE_CHARS)]
        letters = {gold.upper() for gold in golds} & _LETTERS
        texts = {_plain(gold) for gold in golds if gold.upper() not in _LETTERS} - {""}
        if not letters and not texts:
            return Finding(status=Status.GOLD_INVALID)
        solution = item.response.rpartition("</think>")[2][-MAX_RESPONSE_CHARS:]
        chosen = _chosen_letter(solution)
        if chosen and letters:
            credit = float(chosen in letters)
            return Finding(status=Status.OK, credit=credit, extracted=chosen, method=Method.STRUCTURE)
        plain = f" {_plain(solution)} "
        for text in texts:
            if f" {text} " in plain:
                return Finding(status=Status.OK, credit=1.0, extracted=text, method=Method.STRUCTURE)
        if chosen or texts:
            return Finding(status=Status.OK, extracted=chosen, method=Method.STRUCTURE)
        return Finding(status=Status.NO_ANSWER)


def _chosen_letter(solution: str) -> str:
    """Return the letter that a response chooses; empty if none."""
    for statement in _STATEMENTS:
        found = statement.search(solution)
        if found and found[1].upper() in _LETTERS:
            return found[1].upper()
    lone = [letter for letter in _LONE_LETTER.findall(solution) if letter in _LETTERS]
    return lone[-1] if lone else ""


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
