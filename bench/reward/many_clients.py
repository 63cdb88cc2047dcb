"""Many clients at once, each with its own connection: is every answer there, and does it belong to the asker?"""

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio

from bench.reward.http_connection import HttpConnection
from bench.reward.report import Report, percentile
from bench.reward.service_process import ServiceProcess
from penstock.v1 import reward_pb2, reward_pb2_grpc

_TIMEOUT_S = 120.0


async def measure(report: Report, *, num_clients: int, num_calls: int) -> None:
    """Print the outcomes of `num_clients` times `num_calls` calls over gRPC, and of as many over HTTP."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rows, num_bad = [], 0
    for frontend, client in (("gRPC", _rpc_client), ("HTTP", _http_client)):
        with ServiceProcess() as service:
            address = service.address if frontend == "gRPC" else service.http_address
            outcomes: list[str] = []
            times_s: list[float] = []
            started = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for number in range(num_clients):
                    group.create_task(client(address, number, num_calls, outcomes, times_s))
            elapsed_s = time.perf_counter() - started
        total = num_clients * num_calls
        mismatched, good = outcomes.count("mismatched"), outcomes.count("good")
        num_bad += total - good
        rows.append(
            (
                frontend,
                num_clients,
                total,
                total - good - mismatched,
                mismatched,
                f"{total / elapsed_s:.0f}",
                f"{1000 * percentile(times_s or [0.0], 0.5):.0f}",
                f"{1000 * percentile(times_s or [0.0], 0.99):.0f}",
            )
        )
        errors = sorted({outcome for outcome in outcomes if outcome not in ("good", "mismatched")})
        for error in errors[:5]:
            rows.append((f"{frontend}: {error}", "", "", "", "", "", "", ""))
    report.table(
        "Many clients at once",
        ("frontend", "clients", "calls", "lost", "mismatched", "calls/s", "p50 ms", "p99 ms"),
        rows,
        note="All clients are one process, on the service's cores.",
    )
    report.bar(
        f"{num_clients} concurrent clients over gRPC and over HTTP: nothing lost, answers match ids",
        holds=num_bad == 0,
        measured=f"{num_bad} of {2 * num_clients * num_calls} calls without their answer",
    )


Ask = Callable[[str, str], Awaitable[tuple[str, str]]]


async def _calling(ask: Ask, number: int, num_calls: int, outcomes: list[str], times_s: list[float]) -> None:
    """Ask for answers that no other client asks for."""
    for call in range(num_calls):
        name, answer = f"{number}-{call}", str(1 + number * num_calls + call)
        started = time.perf_counter()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                found = await ask(name, answer)
        except (TimeoutError, OSError, EOFError, RuntimeError, grpc.aio.AioRpcError) as error:
            outcomes.append(f"{type(error).__name__}: {str(error)[:120]!r}")
            continue
        times_s.append(time.perf_counter() - started)
        outcomes.append("good" if found == (name, answer) else "mismatched")


async def _rpc_client(address: str, number: int, num_calls: int, outcomes: list[str], times_s: list[float]) -> None:
    # By default all channels of a process share one connection to an address.
    channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
    stub = reward_pb2_grpc.RewardServiceStub(channel)

    async def ask(name: str, answer: str) -> tuple[str, str]:
        item = reward_pb2.VerifyItem(item_id=name, golds=[answer], response=f"\\boxed{{{answer}}}", profile="math")
        verdict = (await stub.Verify(reward_pb2.VerifyRequest(item=item), wait_for_ready=True)).verdict
        return verdict.item_id, verdict.extracted

    await _calling(ask, number, num_calls, outcomes, times_s)
    await channel.close(None)


async def _http_client(address: str, number: int, num_calls: int, outcomes: list[str], times_s: list[float]) -> None:
    connection = HttpConnection(address)
    try:
        await connection.open()
    except OSError as error:
        outcomes.append(f"connection: {error}")
        return

    async def ask(name: str, answer: str) -> tuple[str, str]:
        item = {"item_id": name, "golds": [answer], "response": f"\\boxed{{{answer}}}", "profile": "math"}
        verdict = await connection.post("/v1/verify", item)
        return verdict["item_id"], verdict["extracted"]

    await _calling(ask, number, num_calls, outcomes, times_s)
    await connection.close()
