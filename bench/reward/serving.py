"""The running service: its start, its memory, the duration of a batch, and the throughput of each frontend."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from bench.reward.http_connection import HttpConnection
from bench.reward.items import typical
from bench.reward.report import Report, percentile
from bench.reward.service_process import ServiceProcess
from penstock.clients import RewardClient
from penstock.rpc.channel import connect
from penstock.v1 import reward_pb2, reward_pb2_grpc

_BATCH = 500
_BATCH_BAR_MS = 60
_MEMORY_BAR_MB = 600
_IN_FLIGHT = 64


async def measure(report: Report, *, num_batches: int, num_calls: int) -> None:
    """Print the tables of batches, of the frontends and of the start."""
    with ServiceProcess() as service:
        memory_at_start = service.memory_bytes()
        async with RewardClient(service.address) as client:
            items = [question.to_proto(item_id=str(index)) for index, question in enumerate(typical(_BATCH))]
            for _ in range(3):
                await client.verify_batch(items, timeout_s=60)
            times_ms = []
            for _ in range(num_batches):
                started = time.perf_counter()
                await client.verify_batch(items, timeout_s=60)
                times_ms.append(1000 * (time.perf_counter() - started))
        p50, p99 = percentile(times_ms, 0.5), percentile(times_ms, 0.99)
        report.table(
            f"gRPC VerifyBatch of {_BATCH} items, one call at a time",
            ("calls", "p50 ms", "p99 ms", "items/s"),
            [(num_batches, f"{p50:.1f}", f"{p99:.1f}", f"{1000 * _BATCH * num_batches / sum(times_ms):.0f}")],
        )
        report.bar(
            f"a gRPC batch of {_BATCH} typical items <= {_BATCH_BAR_MS} ms",
            holds=p50 <= _BATCH_BAR_MS,
            measured=f"p50 {p50:.1f} ms, p99 {p99:.1f} ms",
        )
        rows = [
            ("gRPC Verify", _IN_FLIGHT, *_rates(await _unary(service.address, num_calls), num_calls)),
            ("gRPC VerifyStream, one stream", 256, *_rates(await _stream(service.address, num_calls), num_calls)),
            (
                "HTTP POST /v1/verify",
                _IN_FLIGHT,
                *_rates(await _http(service.http_address, num_calls, False), num_calls),
            ),
            ("HTTP POST / (slime)", _IN_FLIGHT, *_rates(await _http(service.http_address, num_calls, True), num_calls)),
        ]
        report.table("One item per call", ("frontend", "in flight", "calls", "calls/s"), rows)
        memory = service.memory_bytes()
        report.table(
            "Start and memory, two workers",
            ("until SERVING", "memory at start", "memory after the above", "processes"),
            [
                (
                    f"{service.start_s:.2f} s",
                    f"{memory_at_start / 1e6:.0f} MB",
                    f"{memory / 1e6:.0f} MB",
                    service.num_processes(),
                )
            ],
            note="Memory is the sum of PSS over the service's processes.",
        )
        report.bar(
            f"memory of the service < {_MEMORY_BAR_MB} MB",
            holds=memory < _MEMORY_BAR_MB * 1e6,
            measured=f"{memory / 1e6:.0f} MB",
        )


def _rates(elapsed_s: float, num_calls: int) -> tuple[int, str]:
    return num_calls, f"{num_calls / elapsed_s:.0f}"


async def _unary(address: str, num_calls: int) -> float:
    questions = typical(1000)
    channel = connect(address)
    stub = reward_pb2_grpc.RewardServiceStub(channel)

    async def ask(number: int) -> None:
        item = questions[number % 1000].to_proto(item_id=str(number))
        answer = await stub.Verify(reward_pb2.VerifyRequest(item=item), timeout=60)
        assert answer.verdict.item_id == str(number)

    try:
        return await _shared(num_calls, lambda: _always(ask))
    finally:
        await channel.close(None)


async def _stream(address: str, num_calls: int) -> float:
    questions = typical(1000)
    channel = connect(address)
    in_flight = asyncio.Semaphore(256)

    async def requests() -> AsyncIterator[reward_pb2.VerifyStreamRequest]:
        for number in range(num_calls):
            await in_flight.acquire()
            yield reward_pb2.VerifyStreamRequest(item=questions[number % 1000].to_proto(item_id=str(number)))

    started = time.perf_counter()
    answered = set()
    async for answer in reward_pb2_grpc.RewardServiceStub(channel).VerifyStream(requests(), timeout=600):
        answered.add(answer.verdict.item_id)
        in_flight.release()
    elapsed_s = time.perf_counter() - started
    await channel.close(None)
    assert len(answered) == num_calls
    return elapsed_s


async def _http(address: str, num_calls: int, is_slime: bool) -> float:
    questions = typical(1000)

    async def connected() -> Callable[[int], Awaitable[None]]:
        connection = HttpConnection(address)
        await connection.open()

        async def ask(number: int) -> None:
            question = questions[number % 1000]
            if is_slime:
                score = await connection.post(
                    "/?profile=geo3k", {"prompt": "", "response": question.response, "label": question.golds[0]}
                )
                assert isinstance(score, float)
                return
            answer = await connection.post(
                "/v1/verify",
                {
                    "item_id": str(number),
                    "golds": list(question.golds),
                    "response": question.response,
                    "profile": "geo3k",
                },
            )
            assert answer["item_id"] == str(number)

        return ask

    return await _shared(num_calls, connected)


async def _always(ask: Callable[[int], Awaitable[None]]) -> Callable[[int], Awaitable[None]]:
    return ask


async def _shared(num_calls: int, connected: Callable[[], Awaitable[Callable[[int], Awaitable[None]]]]) -> float:
    """Return the seconds for `num_calls` calls by _IN_FLIGHT callers, each with its own result of `connected`."""
    numbers = iter(range(num_calls))

    async def calling(ask: Callable[[int], Awaitable[None]]) -> None:
        for number in numbers:
            await ask(number)

    asks = [await connected() for _ in range(_IN_FLIGHT)]
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for ask in asks:
            group.create_task(calling(ask))
    return time.perf_counter() - started
