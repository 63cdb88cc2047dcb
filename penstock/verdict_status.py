"""How the reward service reached a verdict, and which verdicts say nothing about the response.

The only definition: the reward service, the records on the bus, the worker and the trainer's metrics all use it. It
imports nothing, because the reward service's forked workers do.
"""

import enum


class Status(enum.StrEnum):
    """The contract's VerdictStatus without its prefix."""

    OK = "OK"
    NO_ANSWER = "NO_ANSWER"
    GOLD_INVALID = "GOLD_INVALID"
    UNPARSEABLE = "UNPARSEABLE"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    TOO_LARGE = "TOO_LARGE"
    FAILED = "FAILED"


UNJUDGED = frozenset({Status.GOLD_INVALID, Status.TIMEOUT, Status.OUT_OF_MEMORY, Status.FAILED})
"""Statuses that say nothing about the response: it may be right or wrong, and its score has no meaning."""
