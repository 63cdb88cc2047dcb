"""An attempt over real gRPC: when it is over for the caller, and what the replica sees of that."""

import asyncio
import contextlib
import gc
import time
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest

from penstock.clients.stream_attempt import stream_attempt
from penstock.errors import UnavailableError
from penstock.rpc.channel import connect
from tests.support.waiting import promptly, until

LAST = b"last"


class Replica:
    """Sends its chunks, and then ends when it should."""

    def __init__(self, *chunks: bytes) -> None:
        self.chunks = chunks
        self.calls: list[weakref.ref[Any]] = []
        self.may_end = asyncio.Event()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def stream(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            for chunk in self.chunks:
                yield chunk
            await self.may_end.wait()
            self.ended.set_result("by itself")
        except (asyncio.CancelledError, GeneratorExit):
            self.ended.set_result("cancelled")
            raise


class NoReplica:
    """A peer at the other end of a channel that is asked for streams only."""

    name = "replica"

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def generate(self, request: bytes, *, timeout_s: float) -> Any:
        raise AssertionError("an attempt opens its stream on the channel")

    def generate_stream(self, request: bytes, *, timeout_s: float) -> Any:
        raise AssertionError("an attempt opens its stream on the channel")


@contextlib.asynccontextmanager
async def started(replica: Replica) -> AsyncIterator[Callable[[], contextlib.aclosing[Any]]]:
    """What starts an attempt there."""
    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler("S", {"M": grpc.unary_stream_rpc_method_handler(replica.stream)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        method = channel.unary_stream("/S/M", None, None)

        class Peer(NoReplica):
            def generate_stream(self, request: bytes, *, timeout_s: float) -> Any:
                call = method(request, timeout=timeout_s)
                replica.calls.append(weakref.ref(call))
                return call

        def attempt() -> contextlib.aclosing[Any]:
            deadline = time.monotonic() + 20.0
            peer = Peer(channel)
            return contextlib.aclosing(
                stream_attempt(peer, b"", is_last=lambda chunk: chunk == LAST, deadline=deadline)
            )

        yield attempt
    await server.stop(None)


async def test_an_attempt_is_over_with_its_last_chunk() -> None:
    """The caller does not wait for the status, and the replica is not cancelled meanwhile."""
    replica = Replica(b"first", LAST)
    async with started(replica) as attempt:
        async with attempt() as chunks:
            assert [chunk async for chunk in chunks] == [b"first", LAST]
        gc.collect()
        await asyncio.wait({replica.ended}, timeout=0.3)
        assert not replica.ended.done()
        replica.may_end.set()
        assert await promptly(replica.ended) == "by itself"


async def test_an_attempt_left_early_is_cancelled() -> None:
    """The engine is not to go on for nobody."""
    replica = Replica(b"first", LAST)
    async with started(replica) as attempt:
        async with attempt() as chunks:
            async for _ in chunks:
                break
        assert await promptly(replica.ended) == "cancelled"


async def test_an_attempt_without_its_last_chunk_fails_by_its_status() -> None:
    """The status is waited for then."""
    replica = Replica(b"first")
    async with started(replica) as attempt, attempt() as chunks:
        assert await anext(chunks) == b"first"
        waiting = asyncio.ensure_future(anext(chunks, None))
        await asyncio.wait({waiting}, timeout=0.2)
        assert not waiting.done()
        replica.may_end.set()
        assert await waiting is None


async def test_a_replica_that_is_gone_fails_the_attempt() -> None:
    """As unavailable."""
    async with connect("127.0.0.1:1") as channel:
        chunks = stream_attempt(NoReplica(channel), b"", is_last=lambda _: False, deadline=time.monotonic() + 20.0)
        with pytest.raises(UnavailableError, match="replica: no connection"):
            await anext(chunks)


async def test_an_attempt_that_is_over_leaves_no_garbage() -> None:
    """A busy router would hold megabytes of it between two collections."""
    replica = Replica(LAST)
    gc.collect()
    gc.disable()
    try:
        async with started(replica) as attempt:
            async with attempt() as chunks:
                async for _ in chunks:
                    pass
            replica.may_end.set()
            await replica.ended
            await until(lambda: [call() for call in replica.calls] == [None])
    finally:
        gc.enable()
