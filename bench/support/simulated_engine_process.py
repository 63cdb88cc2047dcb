"""An engine without a model that costs as little as possible, so that a benchmark measures the router before it.

It serves GenerateService over gRPC and SGLang's /generate over HTTP, holds a lease, and answers every request with the
same ids after `sampling.temperature` seconds: the caller sets the duration of a request. Streams get the same in even
chunks over that time. It prints its two addresses once it serves.

    python bench/support/simulated_engine_process.py --url=nats://... --run=NAME --replica-id=ID
"""

import argparse
import asyncio
import gc
import logging
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from aiohttp import web

from penstock.bus.buckets.replica_lease import write_replica
from penstock.bus.connection import connect
from penstock.config import BusConfig, LogConfig
from penstock.rpc.server import SERVER_OPTIONS
from penstock.telemetry import log
from penstock.testing.simulated_engine import replica_lease
from penstock.v1 import common_pb2, generate_pb2

SERVICE = "penstock.v1.GenerateService"


class Engine:
    """An engine with prepared answers."""

    def __init__(self, replica_id: str, num_tokens: int) -> None:
        self.replica_id = replica_id
        self.num_tokens = num_tokens
        self.answer = self._make(generate_pb2.GenerateResponse, 0, num_tokens)
        self.http_answer = {
            "text": "",
            "output_ids": list(range(1, num_tokens + 1)),
            "meta_info": {
                "output_token_logprobs": [[-1.0, token, None] for token in range(1, num_tokens + 1)],
                "finish_reason": {"type": "length", "length": num_tokens},
                "prompt_tokens": 1,
                "completion_tokens": num_tokens,
            },
        }
        self._chunks: dict[int, list[bytes]] = {}

    def _make(self, kind: Any, first: int, end: int) -> bytes:
        message = kind(
            output_ids=range(first + 1, end + 1),
            logprobs=[-1.0] * (end - first),
            version_spans=[common_pb2.VersionSpan(num_tokens=end - first, policy_version=0)],
            replica_id=self.replica_id,
        )
        if end == self.num_tokens:
            message.finish_reason = generate_pb2.FINISH_REASON_LENGTH
        if end == self.num_tokens or first == 0:
            message.usage.num_output_tokens = end
        return message.SerializeToString()

    def chunks(self, size: int) -> list[bytes]:
        """Return the answer in chunks of this many tokens."""
        size = max(1, size)
        if size not in self._chunks:
            starts = range(0, self.num_tokens, size)
            self._chunks[size] = [
                self._make(generate_pb2.GenerateChunk, start, min(start + size, self.num_tokens)) for start in starts
            ]
        return self._chunks[size]

    async def generate(self, raw: bytes, context: Any) -> bytes:
        """Generate."""
        await asyncio.sleep(generate_pb2.GenerateRequest.FromString(raw).sampling.temperature)
        return self.answer

    async def generate_stream(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        """GenerateStream."""
        request = generate_pb2.GenerateRequest.FromString(raw)
        chunks = self.chunks(request.chunk_tokens)
        started, loop = asyncio.get_running_loop().time(), asyncio.get_running_loop()
        for number, chunk in enumerate(chunks, 1):
            due = started + request.sampling.temperature * number / len(chunks)
            await asyncio.sleep(max(0.0, due - loop.time()))
            yield chunk

    async def http_generate(self, request: web.Request) -> web.Response:
        """Serve SGLang's /generate, without streams."""
        await asyncio.sleep((await request.json())["sampling_params"]["temperature"])
        return web.json_response(self.http_answer)

    async def http_tell(self, request: web.Request) -> web.Response:
        """Answer a router's questions before it sends requests."""
        return web.json_response({"status": "ok", "model_path": "simulated", "is_generation": True, "dp_size": 1})


async def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--replica-id", required=True)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-running", type=int, default=4096)
    options = parser.parse_args()
    log.configure(LogConfig(level="warning"), service="simulated-engine")
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # sglang-router first tries HTTP/2
    engine = Engine(options.replica_id, options.tokens)

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers = {
        "Generate": grpc.unary_unary_rpc_method_handler(engine.generate),
        "GenerateStream": grpc.unary_stream_rpc_method_handler(engine.generate_stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/generate", engine.http_generate)
    for path in ("/health", "/health_generate", "/get_server_info", "/server_info", "/get_model_info", "/model_info"):
        app.router.add_get(path, engine.http_tell)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=8192)
    await site.start()
    http_port = runner.addresses[0][1]

    replica = common_pb2.Replica(
        replica_id=options.replica_id,
        address=f"127.0.0.1:{port}",
        role=common_pb2.REPLICA_ROLE_UNIFIED,
        state=common_pb2.REPLICA_STATE_READY,
        max_running=options.max_running,
    )
    async with (
        connect(BusConfig(url=options.url), run=options.run) as bus,
        replica_lease(bus, options.replica_id, lambda: write_replica(replica)),
    ):
        sys.stdout.write(f"127.0.0.1:{port} 127.0.0.1:{http_port}\n")
        sys.stdout.flush()
        gc.freeze()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
