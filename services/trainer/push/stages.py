"""The stages of a push, each played with all members at a time; one error names every member that failed."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from penstock.errors import PenstockError
from penstock.rpc.channel import call
from penstock.v1 import rollout_pb2, rollout_pb2_grpc

log = structlog.get_logger()

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that takes part in a push."""

    replica_id: str
    address: str


class MembersFailedError(PenstockError):
    """Some members could not go on; the push is repeated without them."""

    def __init__(self, failures: Mapping[Member, str]) -> None:
        """Name each member that failed, and why."""
        super().__init__("; ".join(f"{member.replica_id}: {reason}" for member, reason in failures.items()))
        self.members = set(failures)


class Stages:
    """Calls the members of one push."""

    def __init__(
        self,
        members: tuple[Member, ...],
        stub: "Callable[[Member], rollout_pb2_grpc.RolloutServiceAsyncStub]",
        push_id: str,
    ) -> None:
        """`stub` gives the connection to a member."""
        self.members = members
        self.push_id = push_id
        self._stub = stub

    async def each(
        self, start: "Callable[[rollout_pb2_grpc.RolloutServiceAsyncStub, Member], Awaitable[Answer]]"
    ) -> dict[Member, Answer]:
        """Start a call to every member and wait for all.

        Raises:
            MembersFailedError: naming every member whose call failed.
        """
        results = await asyncio.gather(
            *(call(start(self._stub(member), member), peer=member.replica_id) for member in self.members),
            return_exceptions=True,
        )
        failures: dict[Member, str] = {}
        answers: dict[Member, Answer] = {}
        for member, result in zip(self.members, results, strict=True):
            if isinstance(result, PenstockError):
                failures[member] = str(result)
            elif isinstance(result, BaseException):
                raise result
            else:
                answers[member] = result
        if failures:
            raise MembersFailedError(failures)
        return answers

    async def each_of_push(self, method: str, request: Callable[..., Any], timeout_s: float) -> None:
        """A stage whose request names nothing but the push."""
        await self.each(lambda stub, _: getattr(stub, method)(request(push_id=self.push_id), timeout=timeout_s))

    async def abort(self, reason: str, timeout_s: float) -> None:
        """Tell every member that the push has ended; one that does not hear it has a watchdog of its own."""
        request = rollout_pb2.AbortWeightsRequest(push_id=self.push_id, reason=reason)
        try:
            await self.each(lambda stub, _: stub.AbortWeights(request, timeout=timeout_s))
        except MembersFailedError as error:
            log.info("push.abort_unheard", reason=str(error))
