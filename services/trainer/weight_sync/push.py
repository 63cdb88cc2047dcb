"""One push of a version to some replicas: prepare, upload, pause, transfer, verify, commit, resume.

A failed member is dropped and the others go on. If one failure blocks a collective stage (forming the process group,
the transfer), the group is closed at once, so that nobody waits for it. Members that only suffered from the failure are
told apart from the one that caused it: they answer when the group is closed, it does not.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.errors import DeadlineError, PenstockError, UnavailableError
from penstock.v1 import rollout_pb2
from services.trainer.config import WeightSyncConfig
from services.trainer.weight_sync.deadlines import PushDeadlines
from services.trainer.weight_sync.push_calls import Answer, Member, NoMembersLeftError, PushCalls, Stub, all_done
from services.trainer.weight_sync.snapshot import WeightSnapshot
from services.trainer.weight_sync.transports.base import CollectiveTransport, PullTransport, Transport

log = structlog.get_logger()

_OWN_SHARE = 0.8
"""Share of a collective stage's time after which its group is closed. The rest is for blocked members to answer."""
_DRAIN_S = 30.0
"""With mode drain, seconds that running requests have to finish; after that they are retracted. New ones wait
meanwhile, so this is what a push may cost at worst. Who has longer answers is better served by retract."""
_CANCEL_NOTICE_S = 2.0
"""Time to tell the members that the push was cancelled."""
_MODES = {
    "retract": rollout_pb2.PAUSE_MODE_RETRACT,
    "in_place": rollout_pb2.PAUSE_MODE_IN_PLACE,
    "drain": rollout_pb2.PAUSE_MODE_DRAIN,
}
_CANCELLED = "the trainer cancelled the push"


class ChecksumError(PenstockError):
    """A replica does not hold the bytes that were sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOutcome:
    """How a push ended for each member."""

    done: tuple[Member, ...]
    """Members that serve the version."""
    failed: Mapping[Member, PenstockError]
    """Members that failed by themselves, and why."""
    failed_in: Mapping[Member, str]
    """The stage in which each of them failed."""
    again: tuple[Member, ...]
    """Members that failed because of others: worth another push without those."""
    is_reusable: bool
    """Whether the transport can carry another push to the same members."""
    paused_at: float
    """When (monotonic) the first engine was asked to stop generating; infinite if none was."""
    stages_s: Mapping[str, float]
    """Duration of each stage that was reached."""


class Push:
    """One push to some members. Use once."""

    def __init__(
        self,
        weights: WeightSnapshot,
        members: tuple[Member, ...],
        *,
        stub: Callable[[Member], Stub],
        config: WeightSyncConfig,
        deadlines: PushDeadlines,
        transport: Transport,
    ) -> None:
        """Push `weights` to `members` over `transport`, which was opened for them."""
        self._weights = weights
        self._config = config
        self._deadlines = deadlines
        self._transport = transport
        self._collective = transport if isinstance(transport, CollectiveTransport) else None
        self._calls = PushCalls(members, stub, f"v{weights.version}-{uuid.uuid4().hex[:8]}")
        self._suffered: set[Member] = set()
        """Members that failed in a collective stage with an error that others can cause."""
        self._first: set[Member] = set()
        """Members that failed before the group was closed."""
        self._paused_at = float("inf")
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
            await self._calls.abort(members, _CANCELLED, _CANCEL_NOTICE_S)
            raise

    async def _run_stages(self) -> None:
        calls, control_s = self._calls, self._deadlines.control_s
        with self._timed("prepare"):
            await self._prepare()
        if calls.failures:
            return  # the process group contains a member that will not take part
        with self._timed("upload"):
            await self._upload()
        if calls.failures:
            return
        self._paused_at = time.monotonic()
        with self._timed("pause"):
            await self._pause()
        if calls.failures:
            return
        with self._timed("transfer"):
            await self._transfer()
        self._transferred = True
        with self._timed("verify"):
            await self._verify()
        with self._timed("commit"):
            await calls.each_of_push("CommitWeights", rollout_pb2.CommitWeightsRequest, control_s)
        with self._timed("resume"):
            await calls.each_of_push("ResumeGeneration", rollout_pb2.ResumeGenerationRequest, control_s)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._stages_s[stage] = time.monotonic() - started
            for member in self._calls.failures:
                self._failed_in.setdefault(member, stage)

    async def _conclude(self) -> PushOutcome:
        """End the push for members that did not complete it, and find out which of them caused that."""
        calls = self._calls
        failures = dict(calls.failures)
        if not failures:
            return PushOutcome(
                done=calls.members,
                failed={},
                failed_in={},
                again=(),
                is_reusable=self._collective is None or not self._collective.is_closed,
                paused_at=self._paused_at,
                stages_s=self._stages_s,
            )
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
        return PushOutcome(
            done=done,
            failed={member: error for member, error in failures.items() if member in to_blame},
            failed_in=self._failed_in,
            again=tuple(member for member in ended if member not in to_blame),
            is_reusable=False,
            paused_at=self._paused_at,
            stages_s=self._stages_s,
        )

    async def _prepare(self) -> None:
        calls, transport, timeout_s = self._calls, self._transport, self._deadlines.prepare_s
        manifest = self._weights.manifest.to_proto()

        def prepare(stub: Stub, member: Member) -> Awaitable[rollout_pb2.PrepareWeightsResponse]:
            request = rollout_pb2.PrepareWeightsRequest(
                push_id=calls.push_id,
                policy_version=self._weights.version,
                manifest=manifest,
                digest=self._weights.digest_kind,
                deadline_s=self._deadlines.push_s,
            )
            transport.announce(member, request)
            return stub.PrepareWeights(request, timeout=timeout_s)

        collective = self._collective
        if collective is None or collective.is_formed:
            await calls.each(prepare)
            return
        own_s = _OWN_SHARE * timeout_s
        error = await self._collectively(prepare, lambda: collective.form(timeout_s=own_s), timeout_s)
        if error is not None and not calls.failures:
            for member in calls.members:
                calls.fail(member, error)

    async def _upload(self) -> None:
        transport, timeout_s = self._transport, self._deadlines.upload_s
        if isinstance(transport, PullTransport):
            push_id = self._calls.push_id
            await self._calls.each(lambda stub, _: transport.upload(stub, push_id, timeout_s=timeout_s))

    async def _pause(self) -> None:
        config = self._config
        drain_s = _DRAIN_S if config.mode == "drain" else 0.0
        request = rollout_pb2.PauseGenerationRequest(
            push_id=self._calls.push_id, mode=_MODES[config.mode], drain_s=drain_s
        )
        timeout_s = self._deadlines.pause_s + drain_s
        await self._calls.each(lambda stub, _: stub.PauseGeneration(request, timeout=timeout_s))

    async def _transfer(self) -> None:
        timeout_s, collective = self._deadlines.transfer_s, self._collective
        request = rollout_pb2.ReceiveWeightsRequest(push_id=self._calls.push_id)

        def receive(stub: Stub, _: Member) -> Awaitable[rollout_pb2.ReceiveWeightsResponse]:
            return stub.ReceiveWeights(request, timeout=timeout_s)

        if collective is None:
            await self._calls.each(receive)
            return
        own_s = _OWN_SHARE * timeout_s
        # A member that reports all buckets goes on, even if the trainer's own part failed: digests decide.
        if await self._collectively(receive, lambda: collective.send(self._weights, timeout_s=own_s), timeout_s):
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
                log.warning("push.group_closed", push_id=calls.push_id, reason=_reason(tasks))
                # Failed members leave the group when they are told, which ends the wait of the others.
                await asyncio.gather(
                    calls.abort(first, "it has failed", self._deadlines.control_s),
                    self._close_group(started if first else {}),
                )
            await all_done(tasks)
        except asyncio.CancelledError:
            # Members leave the group when they are told, which ends the trainer's own wait.
            await asyncio.gather(self._close_group(started), calls.abort(calls.members, _CANCELLED, _CANCEL_NOTICE_S))
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
        log.warning("push.group_failed", push_id=calls.push_id, reason=str(error))
        return error

    async def _close_group(self, started: "Mapping[Member, asyncio.Task[Any]] | None" = None) -> None:
        if self._collective is not None:
            num_coming = sum(not task.done() for task in (started or {}).values())
            await asyncio.to_thread(self._collective.close, num_coming=num_coming)

    async def _verify(self) -> None:
        calls, timeout_s = self._calls, self._deadlines.verify_s
        request = rollout_pb2.VerifyWeightsRequest(push_id=calls.push_id)
        answers = await calls.each(lambda stub, _: stub.VerifyWeights(request, timeout=timeout_s))
        for member, answer in answers.items():
            if differing := await asyncio.to_thread(self._weights.differing_names, answer.digests):
                names = f"{len(differing)} parameters: {differing[:4]}"
                calls.fail(member, ChecksumError(f"{member.replica_id}: weights differ after the push in {names}"))
        if not calls.members:
            raise NoMembersLeftError("no member holds the weights that were sent")


def _reason(tasks: "list[asyncio.Task[Any]]") -> str:
    errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
    return str(errors[0]) if errors else str(DeadlineError("a member hangs"))
