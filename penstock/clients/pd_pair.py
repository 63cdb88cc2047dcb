"""Pairs: one leg of a turn, played by a prefill and a decode replica together.

Both are sent the same request. The prefill replica is done when it has handed its KV cache over, and from then on the
leg is the decode replica's alone; the chunks are all its own. Invariants: the half that fails first ends the other at
once, and one of the two is blamed for it, never both.
"""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.clients.stream_attempt import UnreachableError, reach, seconds_until, stream_attempt
from penstock.errors import PenstockError, UnavailableError
from penstock.rpc.status import error_of

ChunkT = TypeVar("ChunkT")

_ANSWER_TIMEOUT_S = 1.0
"""A replica that says nothing for so long when asked whether it lives is taken for dead."""
_LINGER_S = 2.0
"""A prefill replica whose part is done has so long to say so when the answer is whole; nobody waits for it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PDPeer:
    """A replica that plays one part of a leg."""

    name: str
    """What it is called in messages."""
    channel: grpc.aio.Channel
    """To it."""


class PDPeerError(Exception):
    """A pair failed; this is the half to blame, and its error."""

    def __init__(self, half: PDPeer, error: PenstockError) -> None:
        """`half` failed with `error`."""
        super().__init__(str(error))
        self.half = half
        self.error = error


async def stream_pair(
    prefill: PDPeer,
    decode: PDPeer,
    *,
    start_prefill: Callable[[float], Awaitable[Any]],
    start_decode: Callable[[float], grpc.aio.UnaryStreamCall[Any, ChunkT]],
    on_handover: Callable[[], None],
    is_last: Callable[[ChunkT], bool],
    deadline: float,
) -> AsyncGenerator[ChunkT, None]:
    """The chunks that the decode replica streams. Leaving early cancels both calls.

    Args:
        prefill: Reads the prompt.
        decode: Answers.
        start_prefill: Starts the call to `prefill`, which may take so many seconds.
        start_decode: The same of `decode`.
        on_handover: Called once, when the part of `prefill` is done; it cannot fail the leg any more.
        is_last: As of `penstock.clients.stream_attempt.stream_attempt`.
        deadline: Time of `time.monotonic()` at which it is over.

    Raises:
        PDPeerError: with the error of the half that failed, as of `penstock.clients.stream_attempt.stream_attempt`.
    """
    for half in (prefill, decode):  # before either waits for one that cannot come
        try:
            await reach(half.channel, name=half.name, deadline=deadline)
        except PenstockError as error:
            raise PDPeerError(half, error) from None
    chunks = stream_attempt(decode.channel, start_decode, name=decode.name, is_last=is_last, deadline=deadline)
    prefilling: asyncio.Task[Any] = asyncio.create_task(_prefill(prefill, start_prefill, deadline))
    beginning = asyncio.create_task(_first_of(chunks))
    is_over = False
    try:
        await asyncio.wait((prefilling, beginning), return_when=asyncio.FIRST_COMPLETED)
        is_prefilled = prefilling.done() and prefilling.exception() is None
        if is_prefilled:
            on_handover()
            await asyncio.wait((beginning,))
        if not beginning.done():
            raise await _blame(prefill, prefilling, partner=decode, playing=beginning)
        if beginning.exception() is not None:
            raise await _blame(decode, beginning, partner=prefill, playing=prefilling)
        if not is_prefilled:
            on_handover()  # who decodes has been given what it takes
        if (first := beginning.result()) is not None:
            yield first
        try:
            async for chunk in chunks:
                yield chunk
        except PenstockError as error:
            raise PDPeerError(decode, error) from None
        is_over = True
    finally:
        if is_over:
            _leave(prefilling)
        else:
            prefilling.cancel()
            beginning.cancel()
            await asyncio.gather(prefilling, beginning, return_exceptions=True)
        await chunks.aclose()


async def _prefill(half: PDPeer, start: Callable[[float], Awaitable[Any]], deadline: float) -> None:
    try:
        await start(seconds_until(deadline))
    except grpc.aio.AioRpcError as failure:
        raise error_of(failure, peer=half.name) from None


def _leave(prefilling: asyncio.Task[Any]) -> None:
    """Nothing depends on it any more."""
    if not prefilling.done():
        asyncio.get_running_loop().call_later(_LINGER_S, prefilling.cancel)
    prefilling.add_done_callback(lambda task: task.cancelled() or task.exception())


async def _first_of(chunks: AsyncGenerator[ChunkT, None]) -> ChunkT | None:
    return await anext(chunks, None)


async def _blame(
    half: PDPeer, failed: asyncio.Task[Any], *, partner: PDPeer, playing: asyncio.Task[Any]
) -> PDPeerError:
    """Whose fault it is that `half` failed, where its partner was `playing` or had done its part.

    A replica that dies or refuses in mid-transfer makes its partner fail too, and that may be heard first. So the
    partner is asked whether it is there: if it is not, or its own refusal comes before it says so, it is to blame.
    """
    error = failed.exception()
    if not isinstance(error, PenstockError):
        raise error or AssertionError("it has failed")
    if not isinstance(error, UnavailableError) or (playing.done() and playing.exception() is None):
        return PDPeerError(half, error)
    if not await _answers(partner):
        return PDPeerError(partner, UnreachableError(f"{partner.name}: does not answer; its partner said: {error}"))
    refusal = playing.exception() if playing.done() else None
    if isinstance(refusal, PenstockError) and not isinstance(refusal, UnavailableError):
        return PDPeerError(partner, refusal)
    return PDPeerError(half, error)


async def _answers(half: PDPeer) -> bool:
    """Whether the replica lives, whatever else is with it."""
    check = health_pb2_grpc.HealthStub(half.channel).Check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_TIMEOUT_S)
    try:
        await check
    except grpc.aio.AioRpcError as failure:
        return failure.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True
