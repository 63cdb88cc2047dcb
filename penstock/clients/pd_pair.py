"""One attempt on a PD pair: a prefill and a decode replica together.

Both get the same request. The prefill replica is done when it has handed its KV cache over; the decode replica then
continues alone and produces all chunks. Invariants: the peer that fails first ends the other's call at once, and
exactly one of the two is blamed.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.clients.stream_attempt import LostReplicaError, Peer, reach, seconds_until, stream_attempt
from penstock.errors import PenstockError, UnavailableError
from penstock.rpc.status import error_of
from penstock.v1 import generate_pb2

RequestT = TypeVar("RequestT")
ChunkT = TypeVar("ChunkT")

_HEALTH_TIMEOUT_S = 5.0
"""A replica that does not answer a health check within this time counts as dead. One on a busy host can be silent for
seconds; one whose process has ended refuses the connection at once."""
_LINGER_S = 2.0
"""Seconds that a prefill call may outlast the complete answer; no caller waits for it."""


def reports_prompt(request: generate_pb2.GenerateRequest) -> bool:
    """Return whether the answer reports on the prompt's own tokens, their logprobs or experts: pairs refuse that."""
    return request.prompt_logprobs or request.HasField("routed_experts_from")


class PDPeerError(Exception):
    """An attempt on a pair failed."""

    def __init__(self, error: PenstockError, *, is_prefill: bool) -> None:
        """Store the `error` of the peer to blame: the prefill replica if `is_prefill`, else the decode replica."""
        super().__init__(str(error))
        self.error = error
        self.is_prefill = is_prefill


async def stream_pair(
    prefill: Peer[RequestT, ChunkT],
    decode: Peer[RequestT, ChunkT],
    request: RequestT,
    *,
    on_handover: Callable[[], None],
    is_last: Callable[[ChunkT], bool],
    deadline: float,
) -> AsyncGenerator[ChunkT, None]:
    """Yield the decode replica's chunks. Leaving early cancels both calls.

    Args:
        prefill: Computes the prompt.
        decode: Answers.
        request: The GenerateRequest, with its bootstrap.
        on_handover: Called once, when `prefill` is done and can no longer fail the attempt.
        is_last: As in `stream_attempt`.
        deadline: Time of `time.monotonic()` at which both calls are cancelled.

    Raises:
        PDPeerError: with the error of the peer to blame, as in `stream_attempt`.
    """
    for peer in (prefill, decode):  # before either waits for a partner that cannot come
        try:
            await reach(peer, deadline=deadline)
        except PenstockError as error:
            raise PDPeerError(error, is_prefill=peer is prefill) from None
    chunks = stream_attempt(decode, request, is_last=is_last, deadline=deadline)
    prefilling: asyncio.Task[None] = asyncio.create_task(_prefill(prefill, request, deadline))
    beginning = asyncio.create_task(_first_of(chunks))
    del request  # it may be large, and the calls take long
    is_over = False
    try:
        await asyncio.wait((prefilling, beginning), return_when=asyncio.FIRST_COMPLETED)
        is_prefilled = prefilling.done() and prefilling.exception() is None
        if is_prefilled:
            on_handover()
            await asyncio.wait((beginning,))
        if not beginning.done():
            raise await _blame(prefilling, partner=decode, partner_call=beginning, is_prefill=True)
        if beginning.exception() is not None:
            raise await _blame(beginning, partner=prefill, partner_call=prefilling, is_prefill=False)
        if not is_prefilled:
            on_handover()  # the decode replica answers, so it has the KV cache
        if (first := beginning.result()) is not None:
            yield first
        try:
            async for chunk in chunks:
                yield chunk
        except PenstockError as error:
            raise PDPeerError(error, is_prefill=False) from None
        is_over = True
    finally:
        if is_over:
            _let_end(prefilling)
        else:
            prefilling.cancel()
            beginning.cancel()
            await asyncio.gather(prefilling, beginning, return_exceptions=True)
        await chunks.aclose()


async def _prefill(peer: Peer[RequestT, Any], request: RequestT, deadline: float) -> None:
    try:
        await peer.generate(request, timeout_s=seconds_until(deadline))
    except grpc.aio.AioRpcError as failure:
        raise error_of(failure, peer=peer.name) from None


def _let_end(prefilling: asyncio.Task[None]) -> None:
    """Let the prefill call end in the background; nothing depends on it any more."""
    if not prefilling.done():
        asyncio.get_running_loop().call_later(_LINGER_S, prefilling.cancel)
    prefilling.add_done_callback(lambda task: task.cancelled() or task.exception())


async def _first_of(chunks: AsyncGenerator[ChunkT, None]) -> ChunkT | None:
    return await anext(chunks, None)


async def _blame(
    failed: asyncio.Task[Any], *, partner: Peer[Any, Any], partner_call: asyncio.Task[Any], is_prefill: bool
) -> PDPeerError:
    """Decide which peer to blame for a call that failed while its partner's was running or done.

    A replica that dies or rejects the request makes its partner fail too, and the partner's failure may arrive first.
    So the partner gets a health check: if it is dead, or its own rejection arrives meanwhile, it is to blame.

    Args:
        failed: The call that failed.
        partner: The other peer.
        partner_call: The partner's call.
        is_prefill: Whether the failed call is the prefill replica's.
    """
    error = failed.exception()
    if not isinstance(error, PenstockError):
        raise error or AssertionError("the call has failed")
    if not isinstance(error, UnavailableError) or (partner_call.done() and partner_call.exception() is None):
        return PDPeerError(error, is_prefill=is_prefill)
    if not await _is_alive(partner):
        dead = LostReplicaError(f"{partner.name}: does not answer; its partner said: {error}")
        return PDPeerError(dead, is_prefill=not is_prefill)
    rejection = partner_call.exception() if partner_call.done() else None
    if isinstance(rejection, PenstockError) and not isinstance(rejection, UnavailableError):
        return PDPeerError(rejection, is_prefill=not is_prefill)
    return PDPeerError(error, is_prefill=is_prefill)


async def _is_alive(peer: Peer[Any, Any]) -> bool:
    """Return whether the replica answers a health check, whatever the answer."""
    check = health_pb2_grpc.HealthStub(peer.channel).Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_TIMEOUT_S)
    try:
        await check
    except grpc.aio.AioRpcError as failure:
        return failure.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True
