"""Plays one turn, attempt after attempt, until it is complete, for the router and for clients that bypass it.

    take a slot -> run an attempt there -> complete: done
         ^                |
         +-- incomplete: settle the slot, count the failure, exclude the replica

The caller supplies the source of slots (`SlotSource`) and the form of requests (`TurnProgress`). Invariant: each slot
is released exactly when its attempt ends.
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
"""A turn that this many replicas in a row failed without a token to keep is given up: it may be what breaks them."""
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
        """The replica that computes the prompt for `peer`; None: `peer` computes it."""
        ...

    @property
    def bootstrap(self) -> generate_pb2.Bootstrap | None:
        """The data with which the peers of a pair find each other."""
        ...

    def begin_answer(self) -> None:
        """Record that the first chunk arrived."""
        ...

    def hand_over(self) -> None:
        """Record that the prefill peer is done, so that its part of the slot can be released."""
        ...

    def succeed(self) -> None:
        """Record that the turn is complete."""
        ...

    async def fail(self, error: PenstockError, *, is_prefill: bool) -> PenstockError:
        """Record that the attempt failed with `error`, through the prefill peer or else through `peer`; return the
        error for the turn: NotReadyError if a push interrupted the attempt."""
        ...

    def release(self) -> None:
        """Record that the attempt has ended; has no effect the second time."""
        ...


class SlotSource(Protocol[SlotT]):
    """Gives out slots for the attempts of one turn."""

    async def take(self, num_tokens: int) -> SlotT:
        """Return a slot for a turn with `num_tokens` delivered."""
        ...

    def find_larger(self, slot: SlotT) -> bool:
        """Return whether a turn too long for the slot's replica may continue; the next slot is on a larger one."""
        ...

    def note_failure(self, slot: SlotT, error: PenstockError, *, has_progressed: bool) -> None:
        """Record that the attempt in this slot failed, with or without tokens; the turn continues elsewhere."""
        ...


class TurnProgress(Protocol[RequestT_co, ChunkT]):
    """The delivered part of a turn."""

    @property
    def num_tokens(self) -> int:
        """Tokens delivered, up to the last `end_attempt`."""
        ...

    def require_continuable(self) -> None:
        """Check that another replica can continue from the tokens delivered so far.

        Raises:
            PenstockError: it cannot.
        """
        ...

    def make_request(self, bootstrap: generate_pb2.Bootstrap | None) -> RequestT_co:
        """Return the request of the next attempt."""
        ...

    def is_last(self, chunk: ChunkT) -> bool:
        """Return whether this is the last chunk."""
        ...

    def take(self, chunk: ChunkT) -> ChunkT:
        """Add a chunk; return it as the turn's caller should see it."""
        ...

    def end_attempt(self) -> bool:
        """End the attempt; return whether the turn is complete. A turn that starts over drops what it has.

        Raises:
            PenstockError: the replica's chunks break the contract of GenerateStream.
        """
        ...


class RetryBudget:
    """Bounds the attempts of one turn that may fail."""

    def __init__(self, max_in_a_row: int = MAX_ATTEMPTS) -> None:
        """Allow fewer than `max_in_a_row` failures without a token between them, and a few times as many in total."""
        self._max_in_a_row = max_in_a_row
        self._num_failed = 0
        self._num_in_a_row = 0
        self.is_suspect = False
        """Whether the turn may be what breaks replicas: the last one broke without giving it a token."""

    def count(self, error: PenstockError, *, has_progressed: bool) -> None:
        """Count an attempt that failed with `error`; return if the turn should continue elsewhere.

        An attempt that no replica received, or that the replica rejected, does not count against the turn. A crash in a
        replica that lives on may be the turn's fault or the replica's, so others are tried; but the turn broke nothing,
        so it is not poison.

        Args:
            error: The failure.
            has_progressed: Whether the attempt delivered tokens.

        Raises:
            PoisonError: enough replicas failed; the turn may be what breaks them.
            PenstockError: `error`, because another replica would fail in the same way, or because enough did.
        """
        if isinstance(error, UnreachableError | OverloadedError | NotReadyError):
            return
        is_crash = type(error) is PenstockError
        if not isinstance(error, UnavailableError) and not is_crash:
            raise error
        self._num_failed += 1
        self._num_in_a_row = 0 if has_progressed else self._num_in_a_row + 1
        self.is_suspect = self._num_in_a_row > 0 and not is_crash
        if self._num_in_a_row >= self._max_in_a_row or self._num_failed >= _MAX_FAILURES_FACTOR * self._max_in_a_row:
            if is_crash:
                raise error
            raise PoisonError(f"given up after {self._num_failed} replicas failed; the last: {error}") from None


async def run_turn(
    source: SlotSource[SlotT], turn: TurnProgress[Any, ChunkT], *, budget: RetryBudget, deadline: float
) -> AsyncGenerator[ChunkT, None]:
    """Yield the remaining chunks of an incomplete turn, from one replica after another.

    Args:
        source: Gives out the slots.
        turn: The part delivered so far.
        budget: How many attempts may fail.
        deadline: Time of `time.monotonic()` at which the turn is cancelled.

    Raises:
        PoisonError: too many replicas failed.
        PenstockError: the request is invalid, no replica can continue it, or there is no slot for it.
    """
    while True:
        turn.require_continuable()  # before a replica is asked, which would be blamed for it
        slot, num_before = await source.take(turn.num_tokens), turn.num_tokens
        try:
            async with contextlib.aclosing(_run_attempt(slot, turn, deadline)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        except PenstockError as error:
            has_progressed = turn.num_tokens > num_before
            # Only a replica knows how many tokens images take, so a turn may outgrow it before its first token.
            if not (isinstance(error, PromptTooLongError) and source.find_larger(slot)):
                budget.count(error, has_progressed=has_progressed)
            source.note_failure(slot, error, has_progressed=has_progressed)


async def _run_attempt(
    slot: "AttemptSlot[RequestT, ChunkT]", turn: TurnProgress[RequestT, ChunkT], deadline: float
) -> AsyncGenerator[ChunkT, None]:
    """Yield the chunks of the slot's replica or pair, and release the slot.

    Raises:
        PenstockError: the turn is incomplete.
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
        if isinstance(error, AccessError):  # between caller and replica: the turn was never attempted
            error = UnreachableError(str(error))
        is_rejection = not has_begun and isinstance(error, OverloadedError | NotReadyError | UnreachableError)
        if not is_rejection:  # a failure after the last token does not count
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
