"""One turn, attempt after attempt, until it is whole: the algorithm of the router and of clients that bypass it.

    take a slot -> run an attempt there -> whole: done
         ^                |
         +-- not whole: settle the slot, count the failure, exclude the replica

Whoever gives out slots (`SlotSource`) and whatever the requests are made of (`TurnProgress`) is the caller's.
Invariant: a slot that was taken is released exactly when its attempt ends.
"""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Protocol, TypeVar

from penstock.clients.pd_pair import PDPeerError, stream_pair
from penstock.clients.stream_attempt import Peer, UnreachableError, stream_attempt
from penstock.errors import (
    AccessError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    PoisonError,
    PromptTooLongError,
    UnavailableError,
)
from penstock.v1 import generate_pb2

RequestT = TypeVar("RequestT")
RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
RequestT_co = TypeVar("RequestT_co", covariant=True)
ChunkT = TypeVar("ChunkT")
SlotT = TypeVar("SlotT", bound="AttemptSlot[Any, Any]")

MAX_ATTEMPTS = 3
"""After this many replicas in a row failed a turn without a token, it is given up: it may be what breaks them."""
_MAX_FAILURES_FACTOR = 4
"""A turn is also given up after this many times more failures, even if each replica delivered tokens."""


class AttemptSlot(Protocol[RequestT_contra, ChunkT]):
    """A slot for one attempt, on one replica or on a PD pair."""

    @property
    def peer(self) -> Peer[RequestT_contra, ChunkT]:
        """The replica that answers."""
        ...

    @property
    def prefill_peer(self) -> Peer[RequestT_contra, ChunkT] | None:
        """The replica that computes the prompt for `peer`; None: `peer` does it all."""
        ...

    @property
    def bootstrap(self) -> generate_pb2.Bootstrap | None:
        """How the peers of a pair find each other."""
        ...

    def begin_answer(self) -> None:
        """The first chunk came."""
        ...

    def hand_over(self) -> None:
        """The prefill peer is done: its part of the slot can be released."""
        ...

    def succeed(self) -> None:
        """The turn is whole."""
        ...

    async def fail(self, error: PenstockError, *, is_prefill: bool) -> PenstockError:
        """The attempt failed with `error`, by the fault of the prefill peer or else of `peer`; return what the turn
        should take the error for, NotReadyError if a push broke the attempt off."""
        ...

    def release(self) -> None:
        """The attempt has ended; no effect the second time."""
        ...


class SlotSource(Protocol[SlotT]):
    """Gives out slots for the attempts of one turn."""

    async def take(self, num_tokens: int) -> SlotT:
        """A slot, for a turn of which `num_tokens` were delivered."""
        ...

    def find_larger(self, slot: SlotT) -> bool:
        """Whether a turn that is too long for the slot's replica may go on; the next slot is on a larger one."""
        ...

    def note_failure(self, slot: SlotT, error: PenstockError, *, has_progressed: bool) -> None:
        """The attempt in this slot failed, after it delivered tokens or before; the turn goes on elsewhere."""
        ...


class TurnProgress(Protocol[RequestT_co, ChunkT]):
    """What was delivered of a turn."""

    @property
    def num_tokens(self) -> int:
        """Tokens delivered, up to the last `end_attempt`."""
        ...

    def make_request(self, bootstrap: generate_pb2.Bootstrap | None) -> RequestT_co:
        """The request of the next attempt."""
        ...

    def is_last(self, chunk: ChunkT) -> bool:
        """Whether nothing follows this chunk."""
        ...

    def take(self, chunk: ChunkT) -> ChunkT:
        """Take a chunk; return it as the turn's caller should see it."""
        ...

    def end_attempt(self) -> bool:
        """The attempt has ended; return whether the turn is whole.

        Raises:
            PenstockError: what the replica sent breaks the contract of GenerateStream.
        """
        ...


class RetryBudget:
    """How many attempts of one turn may fail."""

    def __init__(self, max_in_a_row: int = MAX_ATTEMPTS) -> None:
        """Allow fewer than `max_in_a_row` failures without a token between them, and a few times as many in total."""
        self._max_in_a_row = max_in_a_row
        self._num_failed = 0
        self._num_in_a_row = 0

    @property
    def is_suspect(self) -> bool:
        """Whether the turn may be what breaks replicas: the last one failed it without a token."""
        return self._num_in_a_row > 0

    def count(self, error: PenstockError, *, has_progressed: bool) -> None:
        """Count an attempt that failed with `error`; return if the turn should go on elsewhere.

        If no replica had the attempt, or the replica rejected it, that says nothing against the turn.

        Args:
            error: The failure.
            has_progressed: Whether the attempt delivered tokens.

        Raises:
            PoisonError: enough replicas failed; the turn may be what breaks them.
            PenstockError: `error`, because another replica would fail in the same way.
        """
        if isinstance(error, UnreachableError | OverloadedError | NotReadyError):
            return
        if not isinstance(error, UnavailableError):
            raise error
        self._num_failed += 1
        self._num_in_a_row = 0 if has_progressed else self._num_in_a_row + 1
        if self._num_in_a_row >= self._max_in_a_row or self._num_failed >= _MAX_FAILURES_FACTOR * self._max_in_a_row:
            raise PoisonError(f"given up after {self._num_failed} replicas failed; the last: {error}") from None


async def run_turn(
    source: SlotSource[SlotT], turn: TurnProgress[Any, ChunkT], *, budget: RetryBudget, deadline: float
) -> AsyncGenerator[ChunkT, None]:
    """Yield the chunks of what is left of a turn that is not whole, from one replica after another.

    Args:
        source: Gives out the slots.
        turn: What was delivered so far.
        budget: How many attempts may fail.
        deadline: Time of `time.monotonic()` at which the turn is cancelled.

    Raises:
        PoisonError: too many replicas failed.
        PenstockError: the request is invalid, or there is no slot for it.
    """
    while True:
        slot, num_before = await source.take(turn.num_tokens), turn.num_tokens
        try:
            async with contextlib.aclosing(_run_attempt(slot, turn, deadline)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        except PenstockError as error:
            has_progressed = turn.num_tokens > num_before
            # Only a replica knows what images come to, so a turn may outgrow it before its first token.
            if not (isinstance(error, PromptTooLongError) and source.find_larger(slot)):
                budget.count(error, has_progressed=has_progressed)
            source.note_failure(slot, error, has_progressed=has_progressed)


async def _run_attempt(
    slot: "AttemptSlot[RequestT, ChunkT]", turn: TurnProgress[RequestT, ChunkT], deadline: float
) -> AsyncGenerator[ChunkT, None]:
    """Yield what the slot's replica or pair delivers, and release the slot.

    Raises:
        PenstockError: the turn is not whole.
    """
    has_begun = is_prefill = False
    error: PenstockError
    try:
        try:
            async with contextlib.aclosing(_stream(slot, turn, deadline)) as chunks:
                async for chunk in chunks:
                    if not has_begun:
                        has_begun = True
                        slot.begin_answer()
                    yield turn.take(chunk)
            error = UnavailableError(f"{slot.peer.name}: its stream ended before its last chunk")
        except PDPeerError as failure:
            error, is_prefill = failure.error, failure.is_prefill
        except PenstockError as failure:
            error = failure
        if isinstance(error, AccessError):  # between caller and replica, not the turn's fault: it never had the attempt
            error = UnreachableError(str(error))
        is_rejection = not has_begun and isinstance(error, OverloadedError | NotReadyError | UnreachableError)
        if not is_rejection:  # after the last token, a failure is none
            try:
                if turn.end_attempt():
                    slot.succeed()
                    return
            except PenstockError as breach:
                error, is_prefill = breach, False
        raise await slot.fail(error, is_prefill=is_prefill)
    finally:
        slot.release()


def _stream(
    slot: "AttemptSlot[RequestT, ChunkT]", turn: TurnProgress[RequestT, ChunkT], deadline: float
) -> AsyncGenerator[ChunkT, None]:
    request, prefill = turn.make_request(slot.bootstrap), slot.prefill_peer
    if prefill is None:
        return stream_attempt(slot.peer, request, is_last=turn.is_last, deadline=deadline)
    return stream_pair(prefill, slot.peer, request, on_handover=slot.hand_over, is_last=turn.is_last, deadline=deadline)
