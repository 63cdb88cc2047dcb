"""A finding: the contents of a verdict, named as in the contract."""

import enum
from dataclasses import dataclass


class Status(enum.StrEnum):
    """How a verdict was reached: the contract's VerdictStatus without its prefix."""

    OK = "OK"
    NO_ANSWER = "NO_ANSWER"
    GOLD_INVALID = "GOLD_INVALID"
    UNPARSEABLE = "UNPARSEABLE"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    TOO_LARGE = "TOO_LARGE"
    FAILED = "FAILED"


UNJUDGED = frozenset({Status.GOLD_INVALID, Status.TIMEOUT, Status.OUT_OF_MEMORY, Status.FAILED})
"""Statuses that say nothing of the response: whether it is right is not known."""


class Method(enum.StrEnum):
    """What decided: the contract's VerdictMethod without its prefix."""

    UNSPECIFIED = "UNSPECIFIED"
    EXACT = "EXACT"
    STRUCTURE = "STRUCTURE"
    SYMBOLIC = "SYMBOLIC"
    VERIFIER = "VERIFIER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found about one response."""

    status: Status
    credit: float = 0.0
    """How right the answer is: 1 right, 0 wrong, between where a profile gives partial credit."""
    extracted: str = ""
    """The answer as the response has it."""
    method: Method = Method.UNSPECIFIED
