"""A finding: the contents of a verdict, named as in the contract."""

import enum
from dataclasses import dataclass

from penstock.verdict_status import Status


class Method(enum.StrEnum):
    """What decided: the contract's VerdictMethod without its prefix."""

    UNSPECIFIED = "UNSPECIFIED"
    EXACT = "EXACT"
    STRUCTURE = "STRUCTURE"
    SYMBOLIC = "SYMBOLIC"
    VERIFIER = "VERIFIER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The finding about one response."""

    status: Status
    credit: float = 0.0
    """Degree of correctness: 1 right, 0 wrong, between where a profile gives partial credit."""
    extracted: str = ""
    """The answer as the response has it."""
    method: Method = Method.UNSPECIFIED
