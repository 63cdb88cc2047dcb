"""A reward of your own: an answer that is nearly right earns part of the reward."""

import re

_BOX = re.compile(r"\\boxed\{\s*(-?\d+(?:\.\d+)?)\s*\}")
_REACH = 5.0
"""An answer that is off by this much or more earns nothing."""


def verify(golds: list[str], response: str, prompt: str) -> dict[str, object]:
    """Return 1 for the right number, less the further the last boxed number is from it, and 0 beyond `_REACH`.

    Args:
        golds: The row's gold answers; each must be a number.
        response: What the policy wrote.
        prompt: What it was asked.
    """
    boxed = _BOX.findall(response)
    if not boxed:
        return {"credit": 0.0, "extracted": ""}
    distance = min(abs(float(boxed[-1]) - float(gold)) for gold in golds)
    return {"credit": max(0.0, 1.0 - distance / _REACH), "extracted": boxed[-1]}
