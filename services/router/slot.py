"""A place with a replica, and what is learnt of the replica by what becomes of the call that had it.

Invariant: a place is given back exactly once.
"""

import asyncio
import time
from collections.abc import Callable

from penstock.clients.stream_attempt import UnreachableError
from penstock.errors import (
    DeadlineError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    UnavailableError,
)
from penstock.v1 import common_pb2, generate_pb2
from services.router.pool import Member

TRY_AGAIN_S = 0.25
"""A replica that failed or refused a call is offered it again after so long, if nobody else takes it."""
_LEASE_S = 0.1
"""So long it may take until a replica's lease is heard of."""


class Slot:
    """One place with one replica; where that only decodes, it comes with a place with the prefill replica.

    Leaving the context gives both back, and an error of ours that leaves it tells of the culprit.
    """

    __slots__ = (
        "_free",
        "_is_given_back",
        "_is_probe",
        "_is_settled",
        "_policy_version",
        "bootstrap",
        "culprit",
        "member",
        "prefill",
        "sibling",
    )

    def __init__(
        self,
        member: Member,
        free: Callable[[Member], None],
        *,
        prefill: "Slot | None" = None,
        bootstrap: generate_pb2.Bootstrap | None = None,
    ) -> None:
        """Use `SlotPool.take`."""
        self.member = member
        self.prefill = prefill
        """The prefill half's, where the replica only decodes."""
        self.sibling: Slot | None = None
        """The other half's, after `split`."""
        self.bootstrap = bootstrap
        """How the two halves find each other."""
        self.culprit = self
        """Whose failure it is if the call fails: this place, or `prefill`."""
        self._free = free
        self._is_given_back = False
        self._is_settled = False
        candidate = member.candidate
        candidate.num_in_flight += 1
        candidate.limit.use(candidate.num_in_flight)
        self._policy_version = candidate.policy_version
        self._is_probe = candidate.breaker.begin(time.monotonic())

    def __enter__(self) -> "Slot":
        """The place itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Give it back, and that of the prefill half."""
        if isinstance(error, PenstockError) and not self.culprit._is_settled:
            self.culprit.settle(error)
        self.give_back()

    @property
    def max_tokens(self) -> int:
        """The most tokens of prompt and response together that fit; 0: nobody says."""
        own = self.member.candidate.replica.max_tokens
        other = 0 if self.prefill is None else self.prefill.member.candidate.replica.max_tokens
        return min(own, other) if own and other else own or other

    def answered(self) -> None:
        """The first part of an answer came. A probe need not wait for the last: that may take minutes."""
        if self._is_probe:
            self._is_probe = False
            self.member.candidate.breaker.succeed(probe=True)

    def settle(self, error: PenstockError | None) -> None:
        """What came of the call; without this, nothing is learnt of the replica."""
        self._is_settled = True
        candidate, now = self.member.candidate, time.monotonic()
        if isinstance(error, UnavailableError) and not isinstance(error, UnreachableError) and self._is_pushed:
            error = NotReadyError(str(error))
        if isinstance(error, OverloadedError | NotReadyError):  # it is well, and turned the call away
            if isinstance(error, OverloadedError) and candidate.refusing_until <= now:  # once for calls of one moment
                candidate.limit.refuse()
            candidate.refusing_until = now + TRY_AGAIN_S
        if error is None or isinstance(error, OverloadedError | NotReadyError | InvalidRequestError):
            candidate.breaker.succeed(probe=self._is_probe)
        elif isinstance(error, DeadlineError):  # which may be the caller's impatience
            candidate.breaker.abandon(probe=self._is_probe)
        else:
            unreachable = isinstance(error, UnreachableError)
            candidate.breaker.fail(now, probe=self._is_probe, unreachable=unreachable)

    async def judge(self, error: PenstockError) -> PenstockError:
        """What the error of a pair, or of a half, is to be taken for, once it is clear whether it came of a push.

        A push breaks off what a prefill or a decode replica does, and with it what its partner does: that is no failure
        of theirs, nor of the call. Sets `culprit`.
        """
        if (
            self.member.candidate.partners is None
            or not isinstance(error, UnavailableError)
            or isinstance(error, UnreachableError)
        ):
            return error
        both = (self.prefill or self.sibling, self)
        halves = [each for each in both if each is not None and not each._is_settled]
        if not any(each._is_pushed for each in halves):
            await asyncio.sleep(_LEASE_S)
        pushed = next((each for each in halves if each._is_pushed), None)
        if pushed is None:
            return error
        self.culprit = pushed
        return NotReadyError(f"{error} (broken off by a push)")

    def give_back(self) -> None:
        """The next in line may have it. The same of the prefill half."""
        if self.prefill is not None:
            self.prefill.give_back()
        if self._is_given_back:
            return
        self._is_given_back = True
        if not self._is_settled:
            self.member.candidate.breaker.abandon(probe=self._is_probe)
        self.member.candidate.num_in_flight -= 1
        self._free(self.member)

    def split(self) -> "Slot | None":
        """Part with the prefill half's place: from now on it is given back by itself."""
        prefill, self.prefill = self.prefill, None
        if prefill is not None:
            self.sibling, prefill.sibling = prefill, self
        return prefill

    @property
    def _is_pushed(self) -> bool:
        """Whether the replica, half of a pair, takes a push or has taken one since the call began."""
        candidate = self.member.candidate
        return candidate.partners is not None and (
            candidate.replica.state == common_pb2.REPLICA_STATE_UPDATING
            or candidate.policy_version != self._policy_version
        )
