"""GenerateService over a pool, indistinguishable from a single engine for callers."""

import contextlib
from collections.abc import AsyncGenerator

import grpc.aio

from penstock.rpc.server import deadline_s, service_name
from penstock.v1 import generate_pb2
from services.router.forwarder import RequestForwarder
from services.router.resumable_stream import ResumableStream
from services.router.tuning import Tuning

SERVICE_NAME = service_name(generate_pb2.DESCRIPTOR, "GenerateService")


class GenerateServicer:
    """Forwards calls; bytes in, bytes out."""

    def __init__(self, forwarder: RequestForwarder, tuning: Tuning) -> None:
        """Answer calls with `forwarder`."""
        self._forwarder = forwarder
        self._tuning = tuning

    def register(self, server: grpc.aio.Server) -> None:
        """Do what the generated add_GenerateServiceServicer_to_server does, without parsing the messages."""
        handlers = {
            "Generate": grpc.unary_unary_rpc_method_handler(self.Generate),
            "GenerateStream": grpc.unary_stream_rpc_method_handler(self.GenerateStream),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def Generate(self, raw: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:  # noqa: N802 - gRPC's name
        """Answer one turn."""
        stream = ResumableStream(raw, chunk_tokens=self._tuning.chunk_tokens, may_restart=True)
        async with contextlib.aclosing(self._forwarder.forward(stream, timeout_s=self._timeout_s(context))) as chunks:
            async for _ in chunks:
                pass
        return stream.response()

    async def GenerateStream(  # noqa: N802 - gRPC's name
        self, raw: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncGenerator[bytes, None]:
        """Answer one turn and pass its chunks on as they arrive."""
        stream = ResumableStream(raw)
        async with contextlib.aclosing(self._forwarder.forward(stream, timeout_s=self._timeout_s(context))) as chunks:
            async for chunk in chunks:
                yield chunk

    def _timeout_s(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> float:
        return deadline_s(context, default=self._tuning.max_call_s, most=self._tuning.max_call_s)
