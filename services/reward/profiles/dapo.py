r"""The profile `dapo`: the last `Answer:` of a response's last 300 characters, compared with an integer by spelling.

The decisions are those of slime (rm_hub/math_dapo_utils.py, `compute_score`, Apache-2.0), which come from verl's DAPO
recipe and there from lm-evaluation-harness (Minerva's normalisation).
"""

import re

from penstock.verdict_status import Status
from services.reward.item import Item
from services.reward.profiles.profile import MAX_ANSWER_CHARS, BoundedProfile, Decision
from services.reward.verdict import Finding, Method

_SEARCHED_CHARS = 300
_ANSWER = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)

_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}",
    r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots", "<|im_end|>",
    "<|endoftext|>",
)  # fmt: skip
_REWRITTEN = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r".*?\$(.*?)\$.*", r"$\1$"),
        (r"\\text\{(.*?)\}", r"\1"),
        (r"\\textbf\{(.*?)\}", r"\1"),
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
        (r"\$", ""),
    )
]


class DapoProfile(BoundedProfile):
    """Right is an answer with the same spelling as the gold integer."""

    def decide(self, item: Item) -> Decision:
        """Return the finding of `item`."""
        read = [_read_integer(gold) for gold in self._readable(item.golds, MAX_ANSWER_CHARS)]
        golds = [gold for gold in read if gold is not None]
        if not golds:
            return Finding(status=Status.GOLD_INVALID)
        answers = _ANSWER.findall(item.response[-_SEARCHED_CHARS:])
        if not answers:
            return Finding(status=Status.NO_ANSWER)
        right = _normalise(answers[-1]) in golds
        return Finding(status=Status.OK, credit=float(right), extracted=answers[-1].strip(), method=Method.EXACT)


def _read_integer(gold: str) -> str | None:
    """Return the gold answer as an integer, cut off at its decimal point; None if it is not a number."""
    try:
        return str(int(float(_normalise(gold))))
    except (ValueError, OverflowError):
        return None


def _normalise(answer: str) -> str:
    text = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    if text.replace(",", "").isdigit():
        text = text.replace(",", "")
    return text.strip()
