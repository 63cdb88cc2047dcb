"""Every kind of gRPC call through the scaffold: requests and responses, one or many."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import pytest
import structlog

from penstock import errors
from penstock.rpc.channel import connect
from penstock.rpc.server import RpcServer
from tests.support.deadlines import long_enough
from tests.support.waiting import HANG_S, promptly, until

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


@contextlib.asynccontextmanager
async def serving_kind(kind: str, handle, *, by_itself: bool = False):
    """A server with one method of bytes; `handle(requests)` is an async generator of responses."""

    async def requests_of(request) -> AsyncIterator[bytes]:
        if kind.startswith("stream"):
            async for each in request:
                yield each
        else:
            yield request

    async def for_one(request, context) -> bytes:
        async for response in handle(requests_of(request)):
            return response
        raise AssertionError

    async def for_many(request, context) -> AsyncIterator[bytes]:
        async for response in handle(requests_of(request)):
            yield response

    async def for_many_by_itself(request, context) -> None:
        async for response in handle(requests_of(request)):
            async with asyncio.TaskGroup() as group:  # as where responses come from many tasks
                group.create_task(context.write(response))

    for_stream = for_many_by_itself if by_itself else for_many
    method = getattr(grpc, f"{kind}_rpc_method_handler")(for_stream if kind.endswith("_stream") else for_one)
    handler = grpc.method_handlers_generic_handler("test.Kinds", {"Call": method})
    server = RpcServer(host="127.0.0.1", port=0)
    server.add(lambda _, target: target.add_generic_rpc_handlers((handler,)), None, "test.Kinds")
    await server.start()

    async def ask(channel, **options) -> list[bytes]:
        request = iter([b"1", b"2"]) if kind.startswith("stream") else b"1"
        calling = getattr(channel, kind)("/test.Kinds/Call")(request, **({"timeout": HANG_S} | options))
        try:
            return [response async for response in calling] if kind.endswith("_stream") else [await calling]
        finally:
            calling.cancel()  # gRPC forgets to where its task is cancelled before the first answer

    async with connect(server.address) as channel:
        yield channel, ask
    await server.drain(0.0)


@pytest.mark.parametrize("by_itself", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_call_is_answered_and_logged_once(kind: str, by_itself: bool) -> None:
    """One line per call, streams included, whether the handler yields or writes."""

    async def handle(requests) -> AsyncIterator[bytes]:
        async for request in requests:
            yield b"answer " + request

    async with serving_kind(kind, handle, by_itself=by_itself) as (channel, ask):
        with structlog.testing.capture_logs() as logs:
            answers = await ask(channel)
            await until(lambda: any(line["event"] == "rpc.handled" for line in logs))
    assert answers == ([b"answer 1", b"answer 2"] if kind == "stream_stream" else [b"answer 1"])
    [line] = [line for line in logs if line["event"] == "rpc.handled"]
    assert (line["method"], line["outcome"]) == ("/test.Kinds/Call", "OK")


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (errors.OverloadedError("m"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (TimeoutError("m"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (ValueError("m"), grpc.StatusCode.INTERNAL),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
async def test_errors_cross_the_wire_of_every_kind(kind: str, raised: Exception, code: grpc.StatusCode) -> None:
    """A stream gives what came before the error, and then its code and words."""

    async def handle(requests) -> AsyncIterator[bytes]:
        async for _ in requests:
            if kind.endswith("_stream"):
                yield b"first"
            raise raised

    async with serving_kind(kind, handle) as (channel, ask):
        with pytest.raises(grpc.aio.AioRpcError, match="m") as caught:
            await ask(channel)
        assert caught.value.code() == code
        if kind == "unary_stream":
            calling = channel.unary_stream("/test.Kinds/Call")(b"1", timeout=HANG_S)
            assert await calling.read() == b"first"
            with pytest.raises(grpc.aio.AioRpcError, match="m"):
                await calling.read()


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_handler_is_cancelled(kind: str, how: str) -> None:
    """When its caller goes or its time is up; what it had open is closed."""
    begun, closed = asyncio.Event(), asyncio.Event()

    async def handle(requests) -> AsyncIterator[bytes]:
        try:
            async for _ in requests:
                if kind.endswith("_stream"):
                    yield b"first"
                begun.set()
                await asyncio.Event().wait()
        finally:
            closed.set()

    async with serving_kind(kind, handle) as (channel, ask):

        async def play(timeout_s: float) -> None:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(channel, timeout=timeout_s)
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED

        if how == "cancelled":
            calling = asyncio.create_task(ask(channel, timeout=600.0))
            await promptly(begun.wait())
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
        else:
            await long_enough(play, begun.is_set)
        await promptly(closed.wait())


async def test_a_stream_that_nobody_reads_holds_its_handler() -> None:
    """The handler goes on only as its caller reads, while another's goes on; it is cancelled when the caller goes."""
    num_made, closed = Counter[bytes](), asyncio.Event()

    async def handle(requests) -> AsyncIterator[bytes]:
        caller = await anext(requests)
        try:
            while True:
                num_made[caller] += 1
                yield bytes(100_000)
        finally:
            if caller == b"reads no more":
                closed.set()

    async with serving_kind("unary_stream", handle) as (channel, _):
        call = channel.unary_stream("/test.Kinds/Call")
        unread, read = (call(caller, timeout=600.0) for caller in (b"reads no more", b"reads on"))
        assert await unread.read() == bytes(100_000)
        while num_made[b"reads on"] < 1000:
            await read.read()
        assert num_made[b"reads no more"] < 500
        unread.cancel()
        await promptly(closed.wait())
        read.cancel()


@pytest.mark.parametrize("by_itself", [False, True])
async def test_a_caller_that_goes_during_an_answer_is_no_crash(by_itself: bool) -> None:
    """The write that fails then ends the handler before gRPC cancels it; nothing but the cancellation is logged."""
    begun = asyncio.Event()

    async def handle(requests) -> AsyncIterator[bytes]:
        yield b"first"
        begun.set()
        yield bytes(16 * 2**20)  # far more than gRPC sends to a caller that does not read

    with structlog.testing.capture_logs() as logs:
        async with serving_kind("unary_stream", handle, by_itself=by_itself) as (channel, _):
            unread = channel.unary_stream("/test.Kinds/Call")(b"1", timeout=600.0)
            assert await unread.read() == b"first"
            await promptly(begun.wait())
            unread.cancel()
            await until(lambda: any(line["event"] == "rpc.handled" for line in logs))
    calls = [(line["event"], line.get("outcome")) for line in logs if line["event"].startswith("rpc.")]
    assert calls == [("rpc.handled", "CANCELLED")]


@pytest.mark.slow
async def test_no_call_of_a_burst_is_lost() -> None:
    """Thousands that arrive at once are all taken and answered."""

    num_taken, all_taken = 0, asyncio.Event()

    async def handle(requests) -> AsyncIterator[bytes]:
        nonlocal num_taken
        async for request in requests:
            num_taken += 1
            if num_taken == 4096:
                all_taken.set()
            await all_taken.wait()
            yield request

    async with serving_kind("unary_unary", handle) as (channel, _):
        method = channel.unary_unary("/test.Kinds/Call")
        answers = await asyncio.gather(*(method(str(n).encode(), timeout=60.0) for n in range(4096)))
    assert answers == [str(n).encode() for n in range(4096)]
