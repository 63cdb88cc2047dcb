"""GenerateService over a pool: finds a replica for a call, and goes on elsewhere when the replica fails.

Both Generate and GenerateStream are played as streams, so that a replica that dies costs a call only the tokens that it
had not delivered. Invariant: the caller sees one answer, as of one engine.
"""

import contextlib
import time
from collections.abc import AsyncGenerator

import grpc.aio
import structlog

from penstock.errors import DeadlineError, NotReadyError, OverloadedError, PenstockError, UnavailableError
from penstock.rpc.server import deadline_s, service_name
from penstock.rpc.status import error_of
from penstock.v1 import generate_pb2
from services.router.answer import Answer, read_query
from services.router.config import RouterConfig
from services.router.places import Claim, Place, Places, UnreachableError

log = structlog.get_logger()

_CONNECT_TIMEOUT_S = 2.0
_MAX_TRIES_FACTOR = 4
"""A call is given up after so many times `max_tries` replicas failed, even if each of them delivered tokens."""

SERVICE_NAME = service_name(generate_pb2.DESCRIPTOR, "GenerateService")


class GenerateServicer:
    """A caller cannot tell it from one engine."""

    def __init__(self, config: RouterConfig, places: Places) -> None:
        """Play calls on the replicas of `places`."""
        self._config = config
        self._places = places

    def register(self, server: grpc.aio.Server) -> None:
        """What the generated add_GenerateServiceServicer_to_server does, without reading and writing the messages."""
        handlers = {
            "Generate": grpc.unary_unary_rpc_method_handler(self.Generate),
            "GenerateStream": grpc.unary_stream_rpc_method_handler(self.GenerateStream),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def Generate(self, raw: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:  # noqa: N802 - gRPC's name
        """Play one turn; bytes in, bytes out."""
        claim = self._claim(raw, context)
        answer = Answer(raw, chunk_tokens=self._config.chunk_tokens)
        async with contextlib.aclosing(self._play(answer, claim)) as chunks:
            async for _ in chunks:
                pass
        return answer.response()

    async def GenerateStream(  # noqa: N802 - gRPC's name
        self, raw: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncGenerator[bytes, None]:
        """Play one turn and pass its chunks on as they come."""
        claim = self._claim(raw, context)
        async with contextlib.aclosing(self._play(Answer(raw), claim)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _claim(self, raw: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> Claim:
        deadline = time.monotonic() + deadline_s(context, default=self._config.max_call_s)
        return Claim(query=read_query(raw, with_blocks=self._places.policy.reads_blocks), deadline=deadline)

    async def _play(self, answer: Answer, claim: Claim) -> AsyncGenerator[bytes, None]:
        """The chunks of the answer, from one replica after another until it is whole."""
        num_failed = num_in_a_row = 0
        while True:
            place, num_before = await self._places.take(claim), answer.num_tokens
            try:
                async with contextlib.aclosing(_play_leg(place, answer, claim.deadline)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except (UnreachableError, OverloadedError, NotReadyError) as error:
                claim.last_error = error  # the replica never had the call, or turned it away: no fault of the call
            except UnavailableError as error:
                claim.last_error = error
                num_failed += 1
                num_in_a_row = 0 if answer.num_tokens > num_before else num_in_a_row + 1
            replica_id, why = place.member.candidate.replica_id, str(claim.last_error)
            log.warning("generate.retried", request=claim.query.request_id, replica=replica_id, error=why)
            if num_in_a_row >= self._config.max_tries or num_failed >= _MAX_TRIES_FACTOR * self._config.max_tries:
                raise UnavailableError(f"given up after {num_failed} replicas failed; the last: {why}")
            claim.query.excluded |= {replica_id}


async def _play_leg(place: Place, answer: Answer, deadline: float) -> AsyncGenerator[bytes, None]:
    """What the replica delivers of the answer; gives the place back. Unless the answer is whole then, it fails."""
    member = place.member
    with place:
        if not await member.connected(min(_CONNECT_TIMEOUT_S, _seconds_until(deadline))):
            if _seconds_until(deadline) == 0.0:
                raise DeadlineError(f"{member.name}: the deadline passed before there was a connection")
            raise UnreachableError(f"{member.name}: no connection")
        stream, has_begun = member.generate_stream(answer.leg, timeout_s=_seconds_until(deadline)), False
        error: PenstockError
        try:
            async for chunk in stream:
                place.answered()
                has_begun = True
                yield answer.take(chunk)
            error = UnavailableError(f"{member.name}: its stream ended before its last chunk")
        except grpc.aio.AioRpcError as failure:
            error = error_of(failure, peer=member.name)
        finally:
            stream.cancel()
        if isinstance(error, OverloadedError | NotReadyError):
            if not has_begun:
                raise error  # a refusal; the leg is still to be played
            error = UnavailableError(f"{error}, in mid-answer")  # gRPC says so of streams that it resets
        if not answer.end_leg():
            raise error
        place.settle(None)


def _seconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
