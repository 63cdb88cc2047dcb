"""The profile `f1`: scores the words that the response and the gold answer have in common.

The score is that of slime (rm_hub/f1.py, `f1_score`, Apache-2.0), which is SQuAD's: the harmonic mean of precision and
recall over words, in lower case, without punctuation and articles.
"""

import re
import string
from collections import Counter

from penstock.verdict_status import Status
from services.reward.item import Item
from services.reward.profiles.profile import MAX_RESPONSE_CHARS, BoundedProfile, Decision
from services.reward.verdict import Finding, Method

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_CLOSED = frozenset({"yes", "no", "noanswer"})
"""Answers that are right as a whole or not at all."""


class F1Profile(BoundedProfile):
    """The credit is the F1 of the words, with the best-matching gold answer."""

    def decide(self, item: Item) -> Decision:
        """Return the finding of `item`."""
        golds = [_words(gold) for gold in self._readable(item.golds, MAX_RESPONSE_CHARS)]
        if not any(golds):
            return Finding(status=Status.GOLD_INVALID)
        given = _words(item.response[-MAX_RESPONSE_CHARS:])
        if not given:
            return Finding(status=Status.NO_ANSWER)
        return Finding(status=Status.OK, credit=max(_f1(gold, given) for gold in golds), method=Method.EXACT)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _f1(gold: list[str], given: list[str]) -> float:
    if gold != given and not _CLOSED.isdisjoint((" ".join(gold), " ".join(given))):
        return 0.0
    num_common = (Counter(gold) & Counter(given)).total()
    if num_common == 0:
        return 0.0
    precision, recall = num_common / len(given), num_common / len(gold)
    return 2 * precision * recall / (precision + recall)
