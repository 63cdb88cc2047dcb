"""The service without its frontends: items in, verdicts out, in order. Both frontends call this."""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from penstock.errors import InvalidRequestError
from penstock.runtime.security import Tls
from penstock.verdict_status import Status
from services.reward.admission_queue import MAX_ITEMS, AdmissionQueue
from services.reward.config import MAX_DEADLINE_S, RewardConfig
from services.reward.isolation.pool import WorkerPool
from services.reward.isolation.tasks import sendable
from services.reward.item import Item
from services.reward.metrics import Metrics
from services.reward.profiles.profile import Decision, Forwarded, Profile, Undecided
from services.reward.profiles.registry import find_profile, make_profiles
from services.reward.remote import RemoteVerifier
from services.reward.verdict import Finding

log = structlog.get_logger()

_TURN_S = 0.005
"""Seconds that the cheap decisions of a batch may hold the event loop at a time."""
_SHARE_FOR_ITEM = 0.9
"""Share of the caller's remaining time; the rest is for returning the answer."""
_LEAST_S = 0.01
"""Seconds for a check of the format if the rest of the item took all of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A finding with its score."""

    finding: Finding
    score: float
    elapsed_s: float
    """Seconds, without queueing."""


@dataclass(frozen=True, slots=True)
class _Plan:
    item: Item
    profile: Profile
    deadline_s: float


class Verifier:
    """Verifies items by their profiles."""

    def __init__(
        self,
        config: RewardConfig,
        pool: WorkerPool,
        verifiers: Mapping[str, str] | None = None,
        *,
        tls: Tls | None = None,
        max_items: int = MAX_ITEMS,
    ) -> None:
        """Create a verifier; close it after use.

        Args:
            config: The settings.
            pool: Worker processes.
            verifiers: The custom verifiers that they have loaded: locations by name.
            tls: Authorities for the remote service.
            max_items: Items in the service at once.

        Raises:
            ConfigError: the settings of a profile or custom verifier are wrong.
        """
        self._config = config
        self._pool = pool
        self._remote = RemoteVerifier(config.remote, tls) if config.remote.url else None
        self.queue = AdmissionQueue(max_items)
        """Admits each item to the service."""
        self.metrics = Metrics(pool, self.queue)
        self.profiles = make_profiles(config, verifiers)

    async def close(self) -> None:
        """Close the connections to the remote service."""
        if self._remote is not None:
            await self._remote.close()

    async def verify(self, items: Sequence[Item], *, within_s: float | None = None) -> list[Scored]:
        """Verify `items` and return their verdicts in order. Cancelling it kills the workers in use.

        Args:
            items: The items to verify.
            within_s: How long the caller waits; no item's deadline is longer.

        Raises:
            InvalidRequestError: a profile is unknown, a deadline is invalid, or there are too many items.
            OverloadedError: the queue is full.
        """
        plans = self._plans(items, within_s)
        with self.queue.admitted(len(plans)):
            return await self._verify(plans)

    async def verify_when_free(self, items: Sequence[Item], *, within_s: float | None = None) -> list[Scored]:
        """Verify like `verify`, for callers that cannot come back later: wait while the queue is full.

        Raises:
            InvalidRequestError: a profile is unknown, a deadline is invalid, or there are too many items.
        """
        plans = self._plans(items, within_s)
        async with self.queue.admitted_in_turn(len(plans)):
            return await self._verify(plans)

    def _plans(self, items: Sequence[Item], within_s: float | None) -> list[_Plan]:
        longest_s = MAX_DEADLINE_S
        if within_s is not None:
            longest_s = min(longest_s, _SHARE_FOR_ITEM * max(0.0, within_s))
        return [
            _Plan(item, profile, min(self._deadline_s(item, profile), longest_s))
            for item in items
            for profile in (find_profile(self.profiles, item.profile),)
        ]

    async def _verify(self, plans: list[_Plan]) -> list[Scored]:
        verdicts: list[Scored | asyncio.Task[Scored]] = []
        turn_ends = time.monotonic() + _TURN_S
        async with asyncio.TaskGroup() as group:
            for plan in plans:
                started = time.monotonic()
                decision = _decide(plan)
                now = time.monotonic()
                verdict = self._score_at_once(plan, decision, now - started)
                verdicts.append(verdict or group.create_task(self._resolve(plan, decision, now - started)))
                if now > turn_ends:
                    await asyncio.sleep(0)
                    turn_ends = time.monotonic() + _TURN_S
        return [verdict.result() if isinstance(verdict, asyncio.Task) else verdict for verdict in verdicts]

    def _score_at_once(self, plan: _Plan, decision: Decision, spent_s: float) -> Scored | None:
        """Return the verdict if no worker or service need be asked, else None."""
        if not isinstance(decision, Finding):
            return None
        has_format = plan.profile.scoring.check_format(decision, plan.item.response)
        return self._score(plan, decision, spent_s, has_format=has_format) if isinstance(has_format, bool) else None

    async def _resolve(self, plan: _Plan, decision: Decision, spent_s: float) -> Scored:
        """Return the verdict, after asking a worker or the remote service any open questions."""
        verified_s = 0.0
        if isinstance(decision, Undecided):
            finding, verified_s = await self._ask(plan, decision)
        elif isinstance(decision, Forwarded):
            assert self._remote is not None, "only the profile remote forwards, and it is there only with a URL"
            finding, verified_s = await self._remote.verify(plan.item, plan.deadline_s)
        else:
            finding = decision
        has_format = plan.profile.scoring.check_format(finding, plan.item.response)
        if not isinstance(has_format, bool):
            left_s = max(plan.deadline_s - verified_s, _LEAST_S)
            reply, elapsed_s = await self._pool.run(has_format, left_s)
            verified_s += elapsed_s
            if reply.status is not Status.OK:
                log.warning("format.failed", profile=plan.profile.name, status=str(reply.status))
            has_format = reply.credit == 1
        return self._score(plan, finding, spent_s + verified_s, has_format=has_format)

    async def _ask(self, plan: _Plan, question: Undecided) -> tuple[Finding, float]:
        reply, elapsed_s = await self._pool.run(question.task, plan.deadline_s)
        if reply.status is Status.FAILED:
            log.warning("verifier.failed", profile=plan.profile.name, reason=reply.detail)
        finding = Finding(
            status=reply.status,
            credit=reply.credit,
            extracted=reply.extracted or question.extracted,
            method=reply.method,
        )
        return finding, elapsed_s

    def _deadline_s(self, item: Item, profile: Profile) -> float:
        if item.deadline_s == 0:
            return self._config.deadline_s if profile.default_deadline_s is None else profile.default_deadline_s
        if not (math.isfinite(item.deadline_s) and item.deadline_s > 0):
            raise InvalidRequestError(
                f"deadline_s = {item.deadline_s} is not a duration; give seconds > 0, or 0 for the default"
            )
        return item.deadline_s

    def _score(self, plan: _Plan, finding: Finding, elapsed_s: float, *, has_format: bool) -> Scored:
        if not finding.extracted.isascii():
            finding = replace(finding, extracted=sendable(finding.extracted))
        self.metrics.count(plan.profile.name, finding, elapsed_s)
        score = plan.profile.scoring.score(finding, has_format=has_format)
        return Scored(finding=finding, score=score, elapsed_s=elapsed_s)


def _decide(plan: _Plan) -> Decision:
    try:
        return plan.profile.decide(plan.item)
    except Exception:  # a profile's fault becomes its item's status, and the rest of the batch continues
        log.exception("profile.crashed", profile=plan.profile.name)
        return Finding(status=Status.FAILED)
