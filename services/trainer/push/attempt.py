"""One attempt to bring some replicas to a version: prepare, upload, pause, transfer, verify, commit, resume.

Who fails is left out and the others go on. Where the failure of one spoils a stage for all (the group's rendezvous, the
transfer), the group is closed at once, so that nobody waits in vain, and those that only suffered are told apart from
the one that failed: they answer when the group is closed, it does not.
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
from services.trainer.config import PushConfig
from services.trainer.push.published_weights import PublishedWeights
from services.trainer.push.stages import Answer, Member, NobodyLeftError, Stages, Stub, gathered
from services.trainer.push.transport import Transport

log = structlog.get_logger()

_OWN_SHARE = 0.8
"""The group is closed after this share of a stage's time; in the rest, those who waited in vain can say so."""
_LAST_WORD_S = 2.0
"""For telling the members of a push that is cancelled."""
_MODES = {
    "retract": rollout_pb2.PAUSE_MODE_RETRACT,
    "in_place": rollout_pb2.PAUSE_MODE_IN_PLACE,
    "drain": rollout_pb2.PAUSE_MODE_DRAIN,
}
_CANCELLED = "the trainer has stopped the push"


class ChecksumError(PenstockError):
    """A replica does not hold what was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the members."""

    done: tuple[Member, ...]
    """They serve the version."""
    failed: Mapping[Member, PenstockError]
    """They could not go on, and why."""
    failed_in: Mapping[Member, str]
    """The stage of each one's failure, by its name."""
    again: tuple[Member, ...]
    """They suffered from the failure of others: worth another attempt without these."""
    is_reusable: bool
    """Whether the transport is fit for another push to the same members."""
    paused_at: float
    """When (monotonic) the first engine was asked to stop generating; infinite if none was."""
    stages_s: Mapping[str, float]
    """How long each stage took, by its name, as far as it was played."""


class Attempt:
    """One push to some members. Use once."""

    def __init__(
        self,
        weights: PublishedWeights,
        members: tuple[Member, ...],
        *,
        stub: Callable[[Member], Stub],
        config: PushConfig,
        transport: Transport,
    ) -> None:
        """Push `weights` to `members` by `transport`, which is theirs."""
        self._weights = weights
        self._config = config
        self._transport = transport
        self._stages = Stages(members, stub, f"v{weights.version}-{uuid.uuid4().hex[:8]}")
        self._suffered: set[Member] = set()
        """Failed in a stage that others can spoil, in a way that others can cause."""
        self._first: set[Member] = set()
        """Failed before the group was closed."""
        self._paused_at = float("inf")
        self._transferred = False
        self._stages_s: dict[str, float] = {}
        self._failed_in: dict[Member, str] = {}

    async def run(self) -> Outcome:
        """Play all stages."""
        try:
            try:
                await self._play()
            except NobodyLeftError:
                log.debug("push.nobody_left", push_id=self._stages.push_id)
            return await self._sum_up()
        except asyncio.CancelledError:
            await asyncio.to_thread(self._transport.close)
            members = (*self._stages.members, *self._stages.failures)
            await self._stages.abort(members, _CANCELLED, _LAST_WORD_S)
            raise

    async def _play(self) -> None:
        stages, config = self._stages, self._config
        with self._timed("prepare"):
            await self._prepare()
        if stages.failures:
            return  # the group has a member that will take no part
        with self._timed("upload"):
            await self._upload()
        if stages.failures:
            return
        self._paused_at = time.monotonic()
        with self._timed("pause"):
            await self._pause()
        if stages.failures:
            return
        with self._timed("transfer"):
            await self._transfer()
        self._transferred = True
        with self._timed("verify"):
            await self._verify()
        with self._timed("commit"):
            await stages.each_of_push("CommitWeights", rollout_pb2.CommitWeightsRequest, config.control_timeout_s)
        with self._timed("resume"):
            await stages.each_of_push("ResumeGeneration", rollout_pb2.ResumeGenerationRequest, config.control_timeout_s)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._stages_s[stage] = time.monotonic() - started
            for member in self._stages.failures:
                self._failed_in.setdefault(member, stage)

    async def _sum_up(self) -> Outcome:
        """End the push with those that did not complete it, and find out who is to blame."""
        stages = self._stages
        failures = dict(stages.failures)
        if not failures:
            return Outcome(
                done=stages.members,
                failed={},
                failed_in={},
                again=(),
                is_reusable=not self._transport.is_closed,
                paused_at=self._paused_at,
                stages_s=self._stages_s,
            )
        await asyncio.to_thread(self._transport.close)
        done = stages.members if self._transferred else ()
        ended = [member for member in (*stages.members, *failures) if member not in done]
        reason = "; ".join(str(error) for error in failures.values())
        unheard = await stages.abort(ended, reason, self._config.control_timeout_s)
        for member in unheard - failures.keys():
            failures[member] = UnavailableError(f"{member.replica_id}: it did not hear that the push has ended")
            self._failed_in[member] = "abort"
        to_blame = {member for member in failures if member not in self._suffered or member in unheard}
        to_blame = to_blame or (self._first & failures.keys()) or set(failures)
        return Outcome(
            done=done,
            failed={member: error for member, error in failures.items() if member in to_blame},
            failed_in=self._failed_in,
            again=tuple(member for member in ended if member not in to_blame),
            is_reusable=False,
            paused_at=self._paused_at,
            stages_s=self._stages_s,
        )

    async def _prepare(self) -> None:
        stages, transport, timeout_s = self._stages, self._transport, self._config.prepare_timeout_s
        manifest = self._weights.manifest.to_proto()

        def prepare(stub: Stub, member: Member) -> Awaitable[rollout_pb2.PrepareWeightsResponse]:
            request = rollout_pb2.PrepareWeightsRequest(
                push_id=stages.push_id,
                policy_version=self._weights.version,
                manifest=manifest,
                digest=self._weights.digest_kind,
            )
            transport.announce(member, request)
            return stub.PrepareWeights(request, timeout=timeout_s)

        if transport.is_formed:
            await stages.each(prepare)
            return
        own_s = _OWN_SHARE * timeout_s
        error = await self._together(prepare, lambda: transport.form(timeout_s=own_s), timeout_s)
        if error is not None and not stages.failures:
            for member in stages.members:
                stages.fail(member, error)

    async def _upload(self) -> None:
        stages, timeout_s = self._stages, self._config.transfer_timeout_s

        async def upload(stub: Stub, _: Member) -> None:
            pending = self._transport.upload(stub, stages.push_id, timeout_s=timeout_s)
            if pending is not None:
                await pending

        await stages.each(upload)

    async def _pause(self) -> None:
        config = self._config
        drain_s = config.drain_s if config.mode == "drain" else 0.0
        request = rollout_pb2.PauseGenerationRequest(
            push_id=self._stages.push_id, mode=_MODES[config.mode], drain_s=drain_s
        )
        timeout_s = config.pause_timeout_s + drain_s
        await self._stages.each(lambda stub, _: stub.PauseGeneration(request, timeout=timeout_s))

    async def _transfer(self) -> None:
        transport, timeout_s = self._transport, self._config.transfer_timeout_s
        request = rollout_pb2.ReceiveWeightsRequest(push_id=self._stages.push_id)
        own_s = _OWN_SHARE * timeout_s

        # Whoever says that it has all buckets is believed as far as its digests are right, whatever became of the rest.
        if await self._together(
            lambda stub, _: stub.ReceiveWeights(request, timeout=timeout_s),
            lambda: transport.send(self._weights, timeout_s=own_s),
            timeout_s,
        ):
            await asyncio.to_thread(transport.close)

    async def _together(
        self, start: Callable[[Stub, Member], Awaitable[Answer]], own: Callable[[], None], timeout_s: float
    ) -> PenstockError | None:
        """A stage in which trainer and members wait for each other; returns the trainer's own error.

        Raises:
            NobodyLeftError: all members have failed.
        """
        stages = self._stages
        mine = asyncio.create_task(asyncio.to_thread(own))
        calls = stages.start(start)
        tasks: list[asyncio.Task[Any]] = [mine, *calls.values()]
        try:
            # While nothing has failed, there is hope.
            await asyncio.wait(tasks, timeout=_OWN_SHARE * timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            first = {member for member, task in calls.items() if task.done() and task.exception() is not None}
            self._first |= first
            if not all(task.done() for task in tasks):
                log.warning("push.group_closed", push_id=stages.push_id, reason=_reason(tasks))
                # Those that failed leave the group when they hear of it, which ends the wait of the others for them.
                await asyncio.gather(
                    stages.abort(first, "it has failed", self._config.control_timeout_s),
                    self._close_group(calls if first else {}),
                )
            await gathered(tasks)
        except asyncio.CancelledError:
            # Those that hear it leave the group, which ends our own wait for them.
            await asyncio.gather(self._close_group(calls), stages.abort(stages.members, _CANCELLED, _LAST_WORD_S))
            for task in calls.values():
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        before, error = set(stages.failures), mine.exception()
        try:
            stages.take(calls)
        finally:
            self._suffered |= {
                member
                for member, error in stages.failures.items()
                if member not in before and isinstance(error, UnavailableError)
            }
        if error is None:
            return None
        if not isinstance(error, PenstockError):
            raise error
        log.warning("push.group_failed", push_id=stages.push_id, reason=str(error))
        return error

    async def _close_group(self, calls: "Mapping[Member, asyncio.Task[Any]]") -> None:
        num_coming = sum(not task.done() for task in calls.values())
        await asyncio.to_thread(self._transport.close, num_coming=num_coming)

    async def _verify(self) -> None:
        stages, timeout_s = self._stages, self._config.verify_timeout_s
        request = rollout_pb2.VerifyWeightsRequest(push_id=stages.push_id)
        answers = await stages.each(lambda stub, _: stub.VerifyWeights(request, timeout=timeout_s))
        for member, answer in answers.items():
            if differing := await asyncio.to_thread(self._weights.differing_names, answer.digests):
                names = f"{len(differing)} parameters: {differing[:4]}"
                stages.fail(member, ChecksumError(f"{member.replica_id}: weights differ after the push in {names}"))
        if not stages.members:
            raise NobodyLeftError("no member holds the weights that were sent")


def _reason(tasks: "list[asyncio.Task[Any]]") -> str:
    errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
    return str(errors[0]) if errors else str(DeadlineError("somebody hangs"))
