"""GenerateService over a pool: finds a replica or a pair for a call, and goes on elsewhere when that fails.

Both Generate and GenerateStream are played as streams, so that a replica that dies costs a call only the tokens that it
had not delivered. Invariant: the caller sees one answer, as of one engine.
"""

import contextlib
import time
from collections.abc import AsyncGenerator

import grpc.aio
import structlog

from penstock.clients.pd_pair import PDPeerError, stream_pair
from penstock.clients.stream_attempt import RetryBudget, stream_attempt
from penstock.errors import (
    AccessError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    UnavailableError,
)
from penstock.rpc.server import deadline_s, service_name
from penstock.v1 import generate_pb2
from services.router.balancing import Query
from services.router.config import RouterConfig
from services.router.resumable_stream import ResumableStream, is_last, read_query
from services.router.slot import Slot
from services.router.slot_pool import SlotPool
from services.router.wait_queue import Ticket

log = structlog.get_logger()

SERVICE_NAME = service_name(generate_pb2.DESCRIPTOR, "GenerateService")


class GenerateServicer:
    """A caller cannot tell it from one engine."""

    def __init__(self, config: RouterConfig, player: "RequestForwarder") -> None:
        """Have `player` play the calls."""
        self._config = config
        self._player = player

    def register(self, server: grpc.aio.Server) -> None:
        """What the generated add_GenerateServiceServicer_to_server does, without reading and writing the messages."""
        handlers = {
            "Generate": grpc.unary_unary_rpc_method_handler(self.Generate),
            "GenerateStream": grpc.unary_stream_rpc_method_handler(self.GenerateStream),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def Generate(self, raw: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:  # noqa: N802 - gRPC's name
        """Play one turn; bytes in, bytes out."""
        answer = ResumableStream(raw, chunk_tokens=self._config.chunk_tokens)
        async with contextlib.aclosing(self._player.play(raw, answer, timeout_s=self._timeout_s(context))) as chunks:
            async for _ in chunks:
                pass
        return answer.response()

    async def GenerateStream(  # noqa: N802 - gRPC's name
        self, raw: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncGenerator[bytes, None]:
        """Play one turn and pass its chunks on as they come."""
        async with contextlib.aclosing(
            self._player.play(raw, ResumableStream(raw), timeout_s=self._timeout_s(context))
        ) as chunks:
            async for chunk in chunks:
                yield chunk

    def _timeout_s(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> float:
        return deadline_s(context, default=self._config.max_call_s)


class RequestForwarder:
    """Plays calls on the replicas of `places`, whichever face of the router they came to."""

    def __init__(self, config: RouterConfig, places: SlotPool) -> None:
        """Play on the replicas of `places`."""
        self._config = config
        self._places = places

    async def play(self, raw: bytes, answer: ResumableStream, *, timeout_s: float) -> AsyncGenerator[bytes, None]:
        """The chunks of the answer to the serialized GenerateRequest `raw`, from one replica after another until it is
        whole. Leaving it early aborts the request in the engine.

        Raises:
            PenstockError: the request is none, or nobody could play it to its end.
        """
        query = read_query(raw, with_blocks=self._places.balancer.reads_blocks)
        ticket = Ticket(query=query, deadline=time.monotonic() + timeout_s)
        tries, num_tokens = RetryBudget(self._config.max_tries), query.num_tokens
        while True:
            place, num_before = await self._places.take(ticket), answer.num_tokens
            try:
                async with contextlib.aclosing(_play_leg(place, answer, ticket.deadline)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except PenstockError as error:
                if not self._fits_elsewhere(error, place, answer, query):
                    tries.count(error, has_progressed=answer.num_tokens > num_before)
                ticket.last_error = error
            culprit = place.culprit.member.candidate.replica_id
            log.warning("generate.retried", request=query.request_id, replica=culprit, error=str(ticket.last_error))
            query.excluded |= {culprit}
            if answer.num_tokens > num_before:
                ticket.waited_s = 0.0
                query.num_tokens = max(query.num_tokens, num_tokens + answer.num_tokens)

    def _fits_elsewhere(self, error: PenstockError, place: Slot, answer: ResumableStream, query: Query) -> bool:
        """Whether the call was refused by a replica that is too small for what others have begun; then it goes on with
        larger ones, if there are any."""
        if not isinstance(error, InvalidRequestError) or answer.num_tokens == 0 or place.max_tokens == 0:
            return False
        query.num_tokens = place.max_tokens + 1
        return not self._places.is_too_long(query)


async def _play_leg(place: Slot, answer: ResumableStream, deadline: float) -> AsyncGenerator[bytes, None]:
    """What the place's replica or pair delivers of the answer. Unless the answer is whole then, it
    fails, and `place.culprit` says who did."""
    with place:
        has_begun = False
        error: PenstockError
        try:
            async with contextlib.aclosing(_chunks(place, answer.leg, deadline)) as chunks:
                async for chunk in chunks:
                    place.answered()
                    has_begun = True
                    yield answer.take(chunk)
            error = UnavailableError(f"{place.member.name}: its stream ended before its last chunk")
        except PDPeerError as failure:
            if place.prefill is not None and failure.half is place.prefill.member.half:
                place.culprit = place.prefill
            error = await place.judge(failure.error)
        except PenstockError as failure:
            error = failure
        if isinstance(error, AccessError):  # the replica's fault or this router's, but not the caller's
            error = UnavailableError(str(error))
        if isinstance(error, OverloadedError | NotReadyError) and not has_begun:
            raise error  # a refusal; the leg is still to be played
        if not answer.end_leg():
            raise error
        place.settle(None)


def _chunks(place: Slot, leg: bytes, deadline: float) -> AsyncGenerator[bytes, None]:
    """What the replica streams, or the pair."""
    member, prefill = place.member, place.prefill
    if prefill is None:
        return stream_attempt(
            member.channel,
            lambda timeout_s: member.generate_stream(leg, timeout_s=timeout_s),
            name=member.name,
            is_last=is_last,
            deadline=deadline,
        )
    request = leg + generate_pb2.GenerateRequest(bootstrap=place.bootstrap).SerializeToString()

    def hand_over() -> None:
        prefill.settle(None)
        prefill.give_back()

    return stream_pair(
        prefill.member.half,
        member.half,
        start_prefill=lambda timeout_s: prefill.member.generate(request, timeout_s=timeout_s),
        start_decode=lambda timeout_s: member.generate_stream(request, timeout_s=timeout_s),
        on_handover=hand_over,
        is_last=is_last,
        deadline=deadline,
    )
