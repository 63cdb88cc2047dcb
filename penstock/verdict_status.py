"""How a verdict of the reward service was reached, and which verdicts say nothing of the response.

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
"""Statuses that say nothing of the response: whether it is right is not known, and its score has no meaning."""
