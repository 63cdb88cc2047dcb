"""A push in which trainer and members meet in a process group, so that all receive the weights together.

Up to the transfer all members go through each stage together; then each commits at its own pace.

A failed member is dropped and the others go on. If one failure blocks a collective stage (forming the process group,
the transfer), the group is closed at once, so that no member waits for it. Members that only suffered from the failure
answer when the group is closed; the one that caused it does not.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import structlog

from penstock.errors import DeadlineError, PenstockError, UnavailableError
from services.trainer.weight_sync.push_calls import (
    CANCEL_NOTICE_S,
    CANCELLED,
    Answer,
    Member,
    NoMembersLeftError,
    PushCalls,
    Stub,
    all_done,
)
from services.trainer.weight_sync.push_outcome import PushOutcome
from services.trainer.weight_sync.push_stages import PushStages
from services.trainer.weight_sync.transports.base import CollectiveTransport

log = structlog.get_logger()

_OWN_SHARE = 0.8
"""Share of a collective stage's time after which its group is closed. The rest is for blocked members to answer."""


class CollectivePush:
    """One push over a collective transport. Use once."""

    def __init__(
        self,
        stages: PushStages,
        members: tuple[Member, ...],
        stub: Callable[[Member], Stub],
        transport: CollectiveTransport,
        on_served: Callable[[], None],
    ) -> None:
        """Push to `members` over `transport`, opened for them; call `on_served` for each that serves the version."""
        self._stages = stages
        self._deadlines = stages.deadlines
        self._transport = transport
        self._stub = stub
        self._on_served = on_served
        self._calls = PushCalls(members, stub, stages.push_id)
        self._suffered: set[Member] = set()
        """Members that failed in a collective stage with an error that others can cause."""
        self._first: set[Member] = set()
        """Members that failed before the group was closed."""
        self._paused_at: dict[Member, float] = {}
        self._paused_s: dict[Member, float] = {}
        self._transferred = False
        self._stages_s: dict[str, float] = {}
        self._failed_in: dict[Member, str] = {}

    async def run(self) -> PushOutcome:
        """Run all stages."""
        try:
            try:
                await self._run_stages()
            except NoMembersLeftError:
                log.debug("push.no_members_left", push_id=self._calls.push_id)
            return await self._conclude()
        except asyncio.CancelledError:
            await self._close_group()
            members = (*self._calls.members, *self._calls.failures)
            await self._calls.abort(members, CANCELLED, CANCEL_NOTICE_S)
            raise

    async def _run_stages(self) -> None:
        calls, stages = self._calls, self._stages
        with self._timed("prepare"):
            await self._prepare()
        if calls.failures:
            return  # the process group contains a member that will not take part
        self._paused_at = dict.fromkeys(calls.members, time.monotonic())
        with self._timed("pause"):
            await calls.each(stages.pause)
        if calls.failures:
            return
        with self._timed("transfer"):
            await self._transfer()
        self._transferred = True
        try:
            await calls.each(self._commit)
        finally:
            self._stages_s |= stages.mean_s
            for member in calls.failures.keys() - self._failed_in.keys():
                self._failed_in[member] = stages.reached[member]

    async def _commit(self, stub: Stub, member: Member) -> None:
        try:
            await self._stages.run("commit", member, self._stages.commit(stub, member))
            self._on_served()
        finally:
            self._paused_s[member] = time.monotonic() - self._paused_at[member]

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self._stages_s[stage] = ended - started
            for member in (*self._calls.members, *self._calls.failures):
                if member not in self._failed_in:
                    self._stages.record(stage, member, started, ended, self._calls.failures.get(member))
            for member in self._calls.failures:
                self._failed_in.setdefault(member, stage)

    async def _conclude(self) -> PushOutcome:
        """End the push for members that did not complete it, and determine which of them caused the failure."""
        calls = self._calls
        failures = dict(calls.failures)
        if not failures:
            return self._outcome(calls.members, {}, is_reusable=not self._transport.is_closed)
        await self._close_group()
        done = calls.members if self._transferred else ()
        ended = [member for member in (*calls.members, *failures) if member not in done]
        reason = "; ".join(str(error) for error in failures.values())
        silent = await calls.abort(ended, reason, self._deadlines.control_s)
        for member in silent - failures.keys():
            failures[member] = UnavailableError(f"{member.replica_id}: did not answer when the push was aborted")
            self._failed_in[member] = "abort"
        to_blame = {member for member in failures if member not in self._suffered or member in silent}
        to_blame = to_blame or (self._first & failures.keys()) or set(failures)
        return self._outcome(
            done,
            {member: error for member, error in failures.items() if member in to_blame},
            is_reusable=False,
        )

    def _outcome(
        self,
        done: tuple[Member, ...],
        failed: Mapping[Member, PenstockError],
        *,
        is_reusable: bool,
    ) -> PushOutcome:
        now = time.monotonic()
        return PushOutcome(
            done=done,
            failed=failed,
            failed_in=self._failed_in,
            is_reusable=is_reusable,
            paused_s={member: now - paused_at for member, paused_at in self._paused_at.items()} | self._paused_s,
            stages_s=self._stages_s,
        )

    async def _prepare(self) -> None:
        calls, transport, timeout_s = self._calls, self._transport, self._deadlines.prepare_s
        if transport.is_formed:
            await calls.each(self._stages.prepare)
            return
        own_s = _OWN_SHARE * timeout_s
        error = await self._collectively(self._stages.prepare, lambda: transport.form(timeout_s=own_s), timeout_s)
        if error is not None and not calls.failures:
            for member in calls.members:
                calls.fail(member, error)

    async def _transfer(self) -> None:
        transport, timeout_s, weights = self._transport, self._deadlines.transfer_s, self._stages.weights
        own_s = _OWN_SHARE * timeout_s
        # A member that reports all buckets goes on, even if the trainer's own part failed: digests decide.
        if await self._collectively(self._stages.transfer, lambda: transport.send(weights, timeout_s=own_s), timeout_s):
            await self._close_group()

    async def _collectively(
        self, start: Callable[[Stub, Member], Awaitable[Answer]], own: Callable[[], None], timeout_s: float
    ) -> PenstockError | None:
        """Run a stage in which trainer and members wait for each other; return the trainer's own error.

        Raises:
            NoMembersLeftError: all members have failed.
        """
        calls = self._calls
        own_task = asyncio.create_task(asyncio.to_thread(own))
        started = calls.start(start)
        tasks: list[asyncio.Task[Any]] = [own_task, *started.values()]
        try:
            await asyncio.wait(tasks, timeout=_OWN_SHARE * timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            first = {member for member, task in started.items() if task.done() and task.exception() is not None}
            self._first |= first
            if not all(task.done() for task in tasks):
                log.warning("push.process_group_closed", push_id=calls.push_id, reason=_reason(tasks))
                # Failed members leave the group when they are told, which ends the wait of the others.
                await asyncio.gather(
                    calls.abort(first, "it has failed", self._deadlines.control_s),
                    self._close_group(started if first else {}),
                )
            await all_done(tasks)
        except asyncio.CancelledError:
            # Members leave the group when they are told, which ends the trainer's own wait.
            await asyncio.gather(self._close_group(started), calls.abort(calls.members, CANCELLED, CANCEL_NOTICE_S))
            for task in started.values():
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        before, error = set(calls.failures), own_task.exception()
        try:
            calls.take(started)
        finally:
            self._suffered |= {
                member
                for member, error in calls.failures.items()
                if member not in before and isinstance(error, UnavailableError)
            }
        if error is None:
            return None
        if not isinstance(error, PenstockError):
            raise error
        log.warning("push.process_group_failed", push_id=calls.push_id, reason=str(error))
        return error

    async def _close_group(self, started: "Mapping[Member, asyncio.Task[Any]] | None" = None) -> None:
        are_coming = any(not task.done() for task in (started or {}).values())
        await asyncio.to_thread(self._transport.close, are_coming=are_coming)


def _reason(tasks: "list[asyncio.Task[Any]]") -> str:
    errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
    return str(errors[0]) if errors else str(DeadlineError("a member hangs"))
