"""The gRPC calls of a push that are made to all members at once. A member whose call fails takes no further part."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import structlog

from penstock.errors import PenstockError, UnavailableError
from penstock.rpc.channel import call
from penstock.v1 import rollout_pb2, rollout_pb2_grpc

log = structlog.get_logger()

CANCELLED = "the trainer cancelled the push"
CANCEL_NOTICE_S = 2.0
"""Seconds to tell the members that the push was cancelled."""

Answer = TypeVar("Answer")
Stub: TypeAlias = "rollout_pb2_grpc.RolloutServiceAsyncStub"


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that takes part in a push."""

    replica_id: str
    address: str
    num_ranks: int = 1
    """Number of its processes in the process group of a broadcast."""


class NoMembersLeftError(PenstockError):
    """Every member of the push has failed."""


class PushCalls:
    """Calls the members of one push."""

    def __init__(self, members: tuple[Member, ...], stub: Callable[[Member], Stub], push_id: str) -> None:
        """Call `members`; `stub` returns the connection to a member."""
        self.push_id = push_id
        self.members = members
        """Members that have not failed."""
        self.failures: dict[Member, PenstockError] = {}
        self._stub = stub

    def fail(self, member: Member, error: PenstockError) -> None:
        """Record that `member` has failed."""
        self.failures[member] = error
        self.members = tuple(other for other in self.members if other != member)

    async def each(self, start: Callable[[Stub, Member], Awaitable[Answer]]) -> dict[Member, Answer]:
        """Call every member, wait for all, and return the answers of those that have not failed.

        Raises:
            NoMembersLeftError: all members have failed.
        """
        calls = self.start(start)
        await all_done(calls.values())
        return self.take(calls)

    def start(self, start: Callable[[Stub, Member], Awaitable[Answer]]) -> dict[Member, asyncio.Task[Answer]]:
        """Start a call to every member. Failed calls raise errors of `penstock.errors`."""
        return {
            member: asyncio.create_task(called(start(self._stub(member), member), peer=member.replica_id))
            for member in self.members
        }

    def take(self, calls: Mapping[Member, asyncio.Task[Answer]]) -> dict[Member, Answer]:
        """Separate answers from failures once all calls are done.

        Raises:
            NoMembersLeftError: all members have failed.
        """
        answers: dict[Member, Answer] = {}
        for member, done in calls.items():
            error = done.exception()
            if isinstance(error, PenstockError):
                self.fail(member, error)
            else:
                answers[member] = done.result()
        if not self.members:
            raise NoMembersLeftError("all members of the push have failed")
        return answers

    async def abort(self, members: Collection[Member], reason: str, timeout_s: float) -> set[Member]:
        """Tell `members` that the push has ended; return those that did not answer.

        Members that did not answer end it on their own at the push's deadline.
        """
        request = rollout_pb2.AbortWeightsRequest(push_id=self.push_id, reason=reason[:500])
        results = await asyncio.gather(
            *(
                called(self._stub(member).AbortWeights(request, timeout=timeout_s), peer=member.replica_id)
                for member in members
            ),
            return_exceptions=True,
        )
        silent = set()
        for member, result in zip(members, results, strict=True):
            if isinstance(result, PenstockError):
                silent.add(member)
                log.info("push.abort_failed", replica_id=member.replica_id, reason=str(result))
            elif isinstance(result, BaseException):
                raise result
        return silent


async def all_done(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Wait until all tasks have ended, however they end. If cancelled, cancel them too."""
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def called(pending: Awaitable[Answer], *, peer: str) -> Answer:
    """Await a call to a member; a failure becomes an error of `penstock.errors` that names `peer`."""
    try:
        return await call(pending, peer=peer)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # gRPC raises this when the channel is closed during the call; the push was not cancelled.
        raise UnavailableError(f"{peer}: the connection was closed during the call") from None
