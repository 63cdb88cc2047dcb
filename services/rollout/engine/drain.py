"""Drains a replica: refuses new calls, lets running calls finish within a grace period, hands over the rest."""

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

import structlog

log = structlog.get_logger()

_HAND_OVER_S = 5.0
"""Seconds that callers have to take the tokens of calls that are handed over."""


class Calls(Protocol):
    """The running calls (`services.rollout.engine.sglang.engine.SglangEngine`)."""

    @property
    def num_in_flight(self) -> int: ...
    async def idle(self) -> None: ...
    def hand_over(self, reason: str) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """Outcome of a drain: what happened to the running calls."""

    num_finished: int
    num_handed_over: int


class Drain:
    """Drains once, for good."""

    def __init__(self, calls: Calls, begin: Callable[[], Awaitable[None]]) -> None:
        """Drain `calls`, after `begin` has stopped new ones."""
        self._calls = calls
        self._begin = begin
        self._deadline = math.inf
        self._grace: asyncio.Timeout | None = None
        self._task: asyncio.Task[Drained] | None = None

    async def run(self, grace_s: float) -> Drained:
        """Drain, or join the drain in progress; the shortest grace counts. Cancelling a caller does not stop it."""
        deadline = asyncio.get_running_loop().time() + grace_s
        if deadline < self._deadline:
            self._deadline = deadline
            if self._grace is not None:
                self._grace.reschedule(deadline)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return await asyncio.shield(self._task)

    async def _run(self) -> Drained:
        await self._begin()
        num_running = self._calls.num_in_flight
        log.info("replica.draining", num_running=num_running)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._deadline) as self._grace:
                await self._calls.idle()
        self._grace = None
        num_left = self._calls.num_in_flight
        self._calls.hand_over("this engine drains and hands its requests over; play the rest on another replica")
        with suppress(TimeoutError):
            async with asyncio.timeout(_HAND_OVER_S):
                await self._calls.idle()
        log.info("replica.drained", num_finished=num_running - num_left, num_handed_over=num_left)
        return Drained(num_finished=num_running - num_left, num_handed_over=num_left)
