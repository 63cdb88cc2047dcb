"""One attempt on one replica: its stream of chunks, and the error that its failure maps to."""

import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol, TypeVar, cast

import grpc.aio

from penstock.errors import DeadlineError, OverloadedError, UnavailableError
from penstock.rpc.channel import connected
from penstock.rpc.status import error_of

RequestT = TypeVar("RequestT")
RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
ChunkT = TypeVar("ChunkT")

_CONNECT_TIMEOUT_S = 2.0

_ending: set[grpc.aio.UnaryStreamCall[Any, Any]] = set()
"""Calls whose status has yet to arrive; gRPC cancels calls that are garbage-collected."""


class LostReplicaError(UnavailableError):
    """The replica does not answer, though it may have received the attempt."""


class UnreachableError(LostReplicaError):
    """There is no connection: the replica never received the attempt."""


class Peer(Protocol[RequestT_contra, ChunkT]):
    """A replica to call. Requests and chunks are messages, or their bytes."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel to it."""
        ...

    def generate(self, request: RequestT_contra, *, timeout_s: float) -> Awaitable[Any]:
        """Start Generate."""
        ...

    def generate_stream(self, request: RequestT_contra, *, timeout_s: float) -> "grpc.aio.UnaryStreamCall[Any, ChunkT]":
        """Start GenerateStream."""
        ...


def seconds_until(deadline: float) -> float:
    """Return the seconds until that time of `time.monotonic()`; 0 if it has passed."""
    return max(0.0, deadline - time.monotonic())


async def reach(peer: Peer[Any, Any], *, deadline: float) -> None:
    """Wait for a connection to the replica, for at most two seconds.

    Raises:
        UnreachableError: there is none.
        DeadlineError: the deadline passed before there was one.
    """
    if await connected(peer.channel, min(_CONNECT_TIMEOUT_S, seconds_until(deadline))):
        return
    if seconds_until(deadline) == 0.0:
        raise DeadlineError(f"{peer.name}: the deadline passed before there was a connection")
    raise UnreachableError(f"{peer.name}: no connection")


async def stream_attempt(
    peer: Peer[RequestT, ChunkT], request: RequestT, *, is_last: Callable[[ChunkT], bool], deadline: float
) -> AsyncGenerator[ChunkT, None]:
    """Yield the chunks that the replica streams. Leaving early cancels the call.

    The generator ends with the last chunk: the OK status arrives later and adds nothing.

    Args:
        peer: The replica.
        request: The GenerateRequest.
        is_last: Whether this chunk is the last; asked after the caller has received it.
        deadline: Time of `time.monotonic()` at which the attempt is cancelled.

    Raises:
        UnreachableError: there is no connection.
        OverloadedError: the replica rejected the attempt; no chunk came before.
        NotReadyError: the replica rejected the attempt, or hands the rest over.
        PenstockError: the replica's own error, or UnavailableError if the replica is lost.
    """
    await reach(peer, deadline=deadline)
    stream, has_begun, is_over = peer.generate_stream(request, timeout_s=seconds_until(deadline)), False, False
    del request  # it may be large, and the call takes long
    try:
        generator = cast("AsyncGenerator[ChunkT, None]", aiter(stream))  # left open, it would be cyclic garbage
        async with contextlib.aclosing(generator) as chunks:
            async for chunk in chunks:
                has_begun = True
                yield chunk
                if is_last(chunk):
                    is_over = True
                    return
    except grpc.aio.AioRpcError as failure:
        error = error_of(failure, peer=peer.name)
        if has_begun and isinstance(error, OverloadedError):  # gRPC's code for a reset stream
            error = UnavailableError(f"{error}, in mid-answer")
        raise error from None
    finally:
        if is_over:
            _let_end(stream)
        else:
            stream.cancel()


def _let_end(stream: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    """Keep the call until its status has arrived, so that the replica does not see it cancelled."""
    _ending.add(stream)
    stream.add_done_callback(_ending.discard)
