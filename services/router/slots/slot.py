"""A slot: the right to one call on one replica, and what its call reveals about the replica.

Invariant: a slot is released exactly once.
"""

import asyncio
from collections.abc import Callable, Sequence

from penstock.clients.stream_attempt import LostReplicaError
from penstock.errors import (
    DeadlineError,
    InvalidRequestError,
    MissingImageError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    UnavailableError,
)
from penstock.v1 import common_pb2, generate_pb2
from services.router.attempt_span import AttemptSpan
from services.router.balancing import UnroutableReason
from services.router.connection import ReplicaConnection
from services.router.slots.replica_slots import ReplicaSlots

_LEASE_DELAY_S = 1.0
"""Seconds that news of a replica's lease may take to arrive on a busy machine."""
_LEASE_POLL_S = 0.02


class Slot:
    """A slot on one replica; on a decode replica it includes the slot on its prefill replica.

    Attempts run in it (`penstock.clients.turn.AttemptSlot`).
    """

    __slots__ = (
        "_clock",
        "_is_answering",
        "_is_probe",
        "_is_released",
        "_is_settled",
        "_on_begun",
        "_on_release",
        "_policy_version",
        "_replica",
        "_was_held_out",
        "bootstrap",
        "culprit",
        "prefill",
        "sibling",
        "span",
    )

    def __init__(
        self,
        replica: ReplicaSlots,
        on_release: Callable[[ReplicaSlots], None],
        clock: Callable[[], float],
        *,
        prefill: "Slot | None" = None,
        bootstrap: generate_pb2.Bootstrap | None = None,
    ) -> None:
        """Use `SlotPool.take`."""
        self.prefill = prefill
        """The slot on the prefill replica, if this one only decodes."""
        self.sibling: Slot | None = None
        """The other slot of the pair after `split`."""
        self.bootstrap = bootstrap
        """How the peers of the pair find each other."""
        self.culprit = self
        """The slot at fault if the call fails: this one, or `prefill`."""
        self.span: AttemptSpan | None = None
        """The attempt that runs in it, if that is recorded."""
        self._replica = replica
        self._on_release = on_release
        self._clock = clock
        self._is_answering = False
        """Whether the answer has begun, and neither ended nor failed."""
        self._is_released = False
        self._is_settled = False
        self._on_begun: Callable[[], None] | None = None
        self._policy_version = replica.status.policy_version
        self._was_held_out = replica.status.is_held_out
        self._is_probe = replica.begin(clock())

    @property
    def replica_id(self) -> str:
        """The replica's id."""
        return self._replica.replica_id

    @property
    def prompt_replica_id(self) -> str:
        """Id of the replica that computes the prompt."""
        return self.replica_id if self.prefill is None else self.prefill.replica_id

    @property
    def is_first_rejection(self) -> bool:
        """Whether this is the replica's first rejection since its last complete answer."""
        return self._replica.num_rejections == 1

    @property
    def peer(self) -> ReplicaConnection:
        """The replica."""
        return self._replica.connection

    @property
    def prefill_peer(self) -> ReplicaConnection | None:
        """The prefill replica, if this one only decodes."""
        return None if self.prefill is None else self.prefill.peer

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of prompt and response together; 0: the leases do not say."""
        own = self._replica.lease.max_tokens
        other = 0 if self.prefill is None else self.prefill.max_tokens
        return min(own, other) if own and other else own or other

    def call_when_begun(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once: at the first chunk, or when the slot is released without one."""
        self._on_begun = callback

    def begin_answer(self) -> None:
        """Note the first chunk. A probe has then succeeded; the last chunk may take minutes."""
        self._end_beginning()
        self._is_answering = True
        if self.span is not None:
            self.span.begin_answer()
        if self._is_probe:
            self._is_probe = False
            self._replica.succeed(probe=True)

    def hand_over(self) -> None:
        """Settle and release the slot of the prefill replica, which is done."""
        assert self.prefill is not None
        self.prefill.settle(None)
        self.prefill.release()

    def succeed(self) -> None:
        """Note that the call's answer is complete."""
        self.settle(None)

    async def fail(self, error: PenstockError, *, is_prefill: bool) -> PenstockError:
        """Settle the culprit of a call that failed with `error`; return the error that the call should see."""
        self._is_answering = False
        if is_prefill and self.prefill is not None:
            self.culprit = self.prefill
        error = await self.attribute(error)
        if self.span is not None:
            self.span.settle(error)
        if self.culprit is not self.sibling and not self.culprit._is_settled:
            self.culprit.settle(error)
        return error

    def settle(self, error: PenstockError | None) -> None:
        """Note the outcome of the call.

        Without it, an answer that has begun counts as complete at the release, because its caller or its deadline has
        cut it; nothing is learnt from a call without an answer.
        """
        self._is_settled, self._is_answering = True, False
        if self.span is not None:
            self.span.settle(error)
        replica, now = self._replica, self._clock()
        if error is None:
            replica.complete()
        if isinstance(error, UnavailableError) and not isinstance(error, LostReplicaError) and self._is_pushed:
            error = NotReadyError(str(error))
        if isinstance(error, OverloadedError | NotReadyError):  # it is healthy, but rejected the call
            replica.reject(now, is_overload=isinstance(error, OverloadedError))
        if error is None or isinstance(
            error, OverloadedError | NotReadyError | InvalidRequestError | MissingImageError
        ):
            replica.succeed(probe=self._is_probe)
        elif isinstance(error, DeadlineError):  # perhaps the caller was impatient
            replica.abandon(probe=self._is_probe)
        else:
            replica.fail(now, probe=self._is_probe, unreachable=isinstance(error, LostReplicaError))

    async def attribute(self, error: PenstockError) -> PenstockError:
        """Return NotReadyError if an event in the replica's lease explains the failure, else `error`.

        A replica that drains, breaks in a push, or is taken for an evaluation, hands its calls over. A push to one peer
        of a PD pair breaks off its calls and thereby its partner's; the lease may report that a moment later. None of
        this is a failure of the replica or of the call. May set `culprit`.
        """
        if not isinstance(error, UnavailableError) or isinstance(error, LostReplicaError):
            return error
        if self._replica.partners.replica_ids is None:
            status = self._replica.status
            reason = status.unroutable
            if reason is None and status.is_held_out and not self._was_held_out:
                reason = UnroutableReason.HELD_OUT
            return error if reason is None else NotReadyError(f"{error} (the replica is {reason.value})")
        both = (self.prefill or self.sibling, self)
        unsettled = [each for each in both if each is not None and not each._is_settled]
        pushed = await _first_pushed(unsettled)
        if pushed is None:
            return error
        self.culprit = pushed
        return NotReadyError(f"{error} (a push broke it off)")

    def release(self) -> None:
        """Free the slot for the next call, and the slot on the prefill replica; no effect the second time."""
        if self.prefill is not None:
            self.prefill.release()
        if self._is_released:
            return
        self._is_released = True
        self._end_beginning()
        if self._is_answering:
            self._replica.complete()
            self._replica.succeed(probe=self._is_probe)
        elif not self._is_settled:
            self._replica.abandon(probe=self._is_probe)
        if self.span is not None:
            self.span.end()
        self._replica.end()
        self._on_release(self._replica)

    def split(self) -> "Slot | None":
        """Give up the slot on the prefill replica, which is then released separately, and return it."""
        prefill, self.prefill = self.prefill, None
        if prefill is not None:
            self.sibling, prefill.sibling = prefill, self
        return prefill

    def _end_beginning(self) -> None:
        callback, self._on_begun = self._on_begun, None
        if callback is not None:
            callback()

    @property
    def _is_pushed(self) -> bool:
        """Whether the replica, a peer of a pair, is in a push or has been since the call began."""
        replica = self._replica
        return replica.partners.replica_ids is not None and (
            replica.lease.state == common_pb2.REPLICA_STATE_UPDATING
            or replica.status.policy_version != self._policy_version
        )


async def _first_pushed(slots: Sequence[Slot]) -> Slot | None:
    """Return the slot whose lease reports a push, now or within `_LEASE_DELAY_S`; None if none does."""
    for _ in range(round(_LEASE_DELAY_S / _LEASE_POLL_S)):
        for slot in slots:
            if slot._is_pushed:
                return slot
        await asyncio.sleep(_LEASE_POLL_S)
    return None
