"""Replicas whose last push failed, and their next retries. Pure: the caller passes the time."""

from collections.abc import Collection
from dataclasses import dataclass

from penstock.runtime.backoff import Backoff
from services.trainer.weight_sync.push_calls import Member

RETRY_AFTER_S = 5.0
"""Seconds before the first retry: long enough to restart an engine, short against the minutes of its absence."""

_MAX_WAIT_FACTOR = 32
_MAX_INTERRUPTIONS = 2
"""Most interruptions in a row: a replica whose push takes longer than a step would otherwise never come back."""


@dataclass(slots=True)
class _Failure:
    """Consecutive failed pushes of a replica."""

    count: int = 0
    retry_at: float = 0.0
    num_interrupted: int = 0
    """Retries interrupted since the last one that ended."""


class FailedReplicas:
    """Keeps the backoff of each failed replica: `retry_after_s`, doubled after each further failure, up to 32-fold."""

    def __init__(self, retry_after_s: float = RETRY_AFTER_S) -> None:
        """Start without failed replicas."""
        self._backoff = Backoff(retry_after_s, _MAX_WAIT_FACTOR * retry_after_s)
        self._failures: dict[Member, _Failure] = {}

    def __contains__(self, member: Member) -> bool:
        """Return whether the replica's last push failed."""
        return member in self._failures

    def add(self, member: Member, *, now: float) -> float:
        """Record a failure; return the seconds until the retry."""
        failure = self._failures.setdefault(member, _Failure())
        failure.count += 1
        wait_s = self._backoff.after(failure.count)
        failure.retry_at, failure.num_interrupted = now + wait_s, 0
        return wait_s

    def remove(self, member: Member) -> None:
        """Forget the replica's failures, if any."""
        self._failures.pop(member, None)

    def keep_only(self, live: Collection[Member]) -> None:
        """Forget replicas that are not in `live`."""
        self._failures = {member: failure for member, failure in self._failures.items() if member in live}

    def due(self, *, now: float) -> list[Member]:
        """Return the replicas to retry."""
        return [member for member, failure in self._failures.items() if failure.retry_at <= now]

    def may_interrupt(self, member: Member) -> bool:
        """Return whether a publication may interrupt the replica's retry. After two interruptions the next must end."""
        failure = self._failures.get(member)
        return failure is None or failure.num_interrupted < _MAX_INTERRUPTIONS

    def interrupted(self, member: Member) -> None:
        """Record that the replica's retry was interrupted. That is not a failure: the replica stays due."""
        if member in self._failures:
            self._failures[member].num_interrupted += 1
