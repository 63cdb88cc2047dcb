"""Legs of a turn: what one replica plays of it, and what its failure means for the turn.

The router's proxy and the clients that do without it play legs in the same way, and give up after the same failures.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar, cast

import grpc.aio

from penstock.errors import DeadlineError, NotReadyError, OverloadedError, PenstockError, UnavailableError
from penstock.rpc.channel import connected
from penstock.rpc.status import error_of

ChunkT = TypeVar("ChunkT")

MAX_TRIES = 3
"""A turn that so many replicas in a row took and failed without a token is given up: it may be what breaks them."""
_MAX_TRIES_FACTOR = 4
"""And one that so many times that failed, even if each of them delivered tokens."""
_CONNECT_TIMEOUT_S = 2.0

_ending: set[grpc.aio.UnaryStreamCall[Any, Any]] = set()
"""Calls whose status is on its way; gRPC cancels those that are garbage."""


class UnreachableError(UnavailableError):
    """No connection: the replica never had the leg."""


class RetryBudget:
    """How often the legs of one turn failed."""

    def __init__(self, max_in_a_row: int = MAX_TRIES) -> None:
        """Allow `max_in_a_row` failures without a token between them, and in all a few times that."""
        self._max_in_a_row = max_in_a_row
        self._num_failed = 0
        self._num_in_a_row = 0

    def count(self, error: PenstockError, *, has_progressed: bool) -> None:
        """A leg failed with `error`; return if the turn should go on elsewhere.

        Where no replica had the leg, or the one asked turned it away, that says nothing against the turn.

        Args:
            error: What the leg failed with.
            has_progressed: Whether it delivered tokens.

        Raises:
            UnavailableError: enough replicas failed.
            PenstockError: `error`, for it would be the same elsewhere.
        """
        if isinstance(error, UnreachableError | OverloadedError | NotReadyError):
            return
        if not isinstance(error, UnavailableError):
            raise error
        self._num_failed += 1
        self._num_in_a_row = 0 if has_progressed else self._num_in_a_row + 1
        if self._num_in_a_row >= self._max_in_a_row or self._num_failed >= _MAX_TRIES_FACTOR * self._max_in_a_row:
            raise UnavailableError(f"given up after {self._num_failed} replicas failed; the last: {error}") from None


def seconds_until(deadline: float) -> float:
    """Seconds until that time of `time.monotonic()`; 0 when it has passed."""
    return max(0.0, deadline - time.monotonic())


async def reach(channel: grpc.aio.Channel, *, name: str, deadline: float) -> None:
    """See that there is a connection to the replica `name`.

    Raises:
        UnreachableError: there is none.
        DeadlineError: nor is there time to wait for one.
    """
    if await connected(channel, min(_CONNECT_TIMEOUT_S, seconds_until(deadline))):
        return
    if seconds_until(deadline) == 0.0:
        raise DeadlineError(f"{name}: the deadline passed before there was a connection")
    raise UnreachableError(f"{name}: no connection")


async def stream_attempt(
    channel: grpc.aio.Channel,
    start: Callable[[float], grpc.aio.UnaryStreamCall[Any, ChunkT]],
    *,
    name: str,
    is_last: Callable[[ChunkT], bool],
    deadline: float,
) -> AsyncGenerator[ChunkT, None]:
    """The chunks that the replica `name` streams. Leaving early cancels the call there.

    It ends with the last chunk: that all went well comes on its own, later, and says nothing new.

    Args:
        channel: To the replica.
        start: Starts the call, which may take so many seconds.
        name: What the replica is called in messages.
        is_last: Whether nothing comes after this chunk; asked when the caller has had it.
        deadline: Time of `time.monotonic()` at which it is over.

    Raises:
        UnreachableError: there is no connection.
        OverloadedError: the replica turned the leg away; no chunk came before.
        NotReadyError: so it did, or it hands over what is left of the leg.
        PenstockError: as the replica says, or UnavailableError where it is lost.
    """
    await reach(channel, name=name, deadline=deadline)
    stream, has_begun, is_over = start(seconds_until(deadline)), False, False
    try:
        generator = cast("AsyncGenerator[ChunkT, None]", aiter(stream))  # left open, it would be garbage in a cycle
        async with contextlib.aclosing(generator) as chunks:
            async for chunk in chunks:
                has_begun = True
                yield chunk
                if is_last(chunk):
                    is_over = True
                    return
    except grpc.aio.AioRpcError as failure:
        error = error_of(failure, peer=name)
        if has_begun and isinstance(error, OverloadedError):  # gRPC says so of streams that it resets
            error = UnavailableError(f"{error}, in mid-answer")
        raise error from None
    finally:
        if is_over:
            _let_end(stream)
        else:
            stream.cancel()


def _let_end(stream: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    """Nobody waits for the call's status, but the replica is not to see it cancelled."""
    _ending.add(stream)
    stream.add_done_callback(_ending.discard)
