"""Client of GenerateService: a router, or an engine directly."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from penstock.clients.base import Client
from penstock.errors import PenstockError
from penstock.rpc.channel import call, stream
from penstock.runtime.security import Security
from penstock.v1 import generate_pb2, generate_pb2_grpc


class GenerateClient(Client):
    """Generation, by a router or by an engine directly."""

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        """Prepare a channel to the router or engine at `address` (host:port)."""
        super().__init__(address, security=security)
        self._stub = generate_pb2_grpc.GenerateServiceStub(self._channel)

    async def generate(
        self, request: generate_pb2.GenerateRequest, *, timeout_s: float, retry_until: float | None = None
    ) -> generate_pb2.GenerateResponse:
        """Play one turn.

        Args:
            request: The turn. A retry carries the same request under a request id of its own.
            timeout_s: Deadline of one attempt.
            retry_until: Time of `time.monotonic()` until which a call that may succeed later is retried.

        Raises:
            InvalidRequestError: the request can never succeed.
            UnavailableError: no server could take it.
            NotReadyError: the engine is older than the request's min_policy_version.
            DeadlineError: an attempt exceeded its deadline.
        """

        async def attempt(number: int, remaining_s: float) -> generate_pb2.GenerateResponse:
            tried = request
            if number > 0:
                tried = generate_pb2.GenerateRequest()
                tried.CopyFrom(request)
                tried.request_id = f"{request.request_id}#{number}"
            return await call(self._stub.Generate(tried, timeout=remaining_s), peer=f"generate at {self.address}")

        return await self._retried(attempt, timeout_s=timeout_s, retry_until=retry_until)

    async def stream(
        self, request: generate_pb2.GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[generate_pb2.GenerateChunk, None]:
        """Play one turn and yield its tokens as they arrive; the last chunk has a finish reason.

        There are no retries: yielded chunks stay valid, and `penstock.clients.resumable` plays the rest. Leaving the
        iteration early cancels the call: use `contextlib.aclosing` if that must not wait for the garbage collector.

        Args:
            request: The turn.
            timeout_s: Deadline of the whole stream.

        Raises:
            InvalidRequestError: the request can never succeed.
            UnavailableError: no server could take it, or the one that did could not finish it.
            NotReadyError: the engine is older than the request's min_policy_version.
            OverloadedError: the queue is full.
            DeadlineError: the stream exceeded its deadline.
        """
        peer = f"generate at {self.address}"
        is_finished = False
        async with aclosing(stream(self._stub.GenerateStream(request, timeout=timeout_s), peer=peer)) as chunks:
            async for chunk in chunks:
                is_finished = chunk.finish_reason != generate_pb2.FINISH_REASON_UNSPECIFIED
                yield chunk
        if not is_finished:
            raise PenstockError(f"{peer}: the stream of request {request.request_id!r} ended without a finish reason")
