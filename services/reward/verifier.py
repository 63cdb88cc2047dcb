"""The service without its faces: items in, verdicts out, in order. gRPC, and what else there will be, calls this."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import InvalidRequestError
from services.reward.config import RewardConfig
from services.reward.isolation.pool import WorkerPool
from services.reward.item import Item
from services.reward.profiles.profile import Profile, Undecided
from services.reward.profiles.registry import find_profile, make_profiles
from services.reward.verdict import Judgement

_TURN_S = 0.005
"""So long may the cheap decisions of a batch hold the event loop at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A judgement with its score."""

    judgement: Judgement
    score: float
    elapsed_s: float
    """Queueing excluded."""


class Verifier:
    """Judges items by their profiles."""

    def __init__(self, config: RewardConfig, pool: WorkerPool) -> None:
        self._config = config
        self._pool = pool
        self.profiles = make_profiles(config)

    async def verify(self, items: Sequence[Item]) -> list[Scored]:
        """Judge `items`; the verdicts come in their order. Cancelling it kills the workers that are at it.

        Raises:
            InvalidRequestError: a profile is unknown, a deadline is no length of time, or these are too many items.
            OverloadedError: the queue is full.
        """
        if len(items) > self._config.max_queue:
            raise InvalidRequestError(
                f"a batch of {len(items)} items is more than the queue holds; send at most {self._config.max_queue}"
            )
        plans = [(item, find_profile(self.profiles, item.profile), self._deadline_s(item)) for item in items]
        with self._pool.reserve(len(items)):
            verdicts: list[Scored | asyncio.Task[Scored]] = []
            turn_ends = time.monotonic() + _TURN_S
            async with asyncio.TaskGroup() as group:
                for item, profile, deadline_s in plans:
                    started = time.monotonic()
                    decision = profile.decide(item)
                    now = time.monotonic()
                    if isinstance(decision, Undecided):
                        verdicts.append(
                            group.create_task(self._ask(item, profile, decision, deadline_s, now - started))
                        )
                    else:
                        verdicts.append(_score(item, profile, decision, now - started))
                    if now > turn_ends:
                        await asyncio.sleep(0)
                        turn_ends = time.monotonic() + _TURN_S
        return [verdict.result() if isinstance(verdict, asyncio.Task) else verdict for verdict in verdicts]

    async def _ask(
        self, item: Item, profile: Profile, question: Undecided, deadline_s: float, spent_s: float
    ) -> Scored:
        reply, elapsed_s = await self._pool.run(question.task, deadline_s)
        judgement = Judgement(
            status=reply.status,
            credit=reply.credit,
            extracted=reply.extracted or question.extracted,
            method=reply.method,
        )
        return _score(item, profile, judgement, spent_s + elapsed_s)

    def _deadline_s(self, item: Item) -> float:
        if item.deadline_s == 0:
            return self._config.deadline_s
        if not (math.isfinite(item.deadline_s) and item.deadline_s > 0):
            raise InvalidRequestError(f"deadline_s = {item.deadline_s} is no length of time; give seconds > 0, or 0")
        return min(item.deadline_s, self._config.max_deadline_s)


def _score(item: Item, profile: Profile, judgement: Judgement, elapsed_s: float) -> Scored:
    return Scored(judgement=judgement, score=profile.scoring.score(judgement, item.response), elapsed_s=elapsed_s)
