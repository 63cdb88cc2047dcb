"""Subjects of bench/router/bench_router.py: simulated engines, the routers before them, and the ways to call them."""

import argparse
import asyncio
import contextlib
import itertools
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from penstock.bus.local_server import local_server
from penstock.clients import GenerateClient, RouterClient
from penstock.clients.routed import RoutedGenerateClient
from penstock.errors import PenstockError
from penstock.runtime.children.parent_death import dying_with_parent
from penstock.runtime.ports import free_ports
from penstock.v1 import generate_pb2

ROOT = Path(__file__).resolve().parents[2]
ENGINE_SCRIPT = Path(__file__).with_name("simulated_engine_process.py")
RUN = "bench"
TIMEOUT_S = 120.0

Call = Callable[[str, float], Awaitable[None]]
"""Plays one turn of the session, which takes this many seconds in the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A way to call the engines."""

    name: str
    call: Call
    baseline: str
    """The subject whose latencies are subtracted from its own."""
    router: psutil.Process | None = None
    """The router process, if there is one."""


def processes(router: psutil.Process | None) -> Iterator[psutil.Process]:
    if router is not None:
        yield from (router, *router.children(recursive=True))


def cpu_s(router: psutil.Process | None) -> float:
    """Return user and system time."""
    return sum(each.cpu_times().user + each.cpu_times().system for each in processes(router))


def pss_mib(router: psutil.Process | None) -> float:
    """Return the proportional set size."""
    return sum(each.memory_full_info().pss for each in processes(router)) / 2**20


def request_of(session: str, latency_s: float, num_tokens: int, prompt: list[int]) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        request_id=session,
        session_id=session,
        input_ids=prompt,
        sampling=generate_pb2.SamplingParams(temperature=latency_s, max_new_tokens=num_tokens),
        chunk_tokens=64,
    )


@contextlib.asynccontextmanager
async def process(*command: str | Path) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=subprocess.PIPE, cwd=ROOT, preexec_fn=dying_with_parent()
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.terminate()
        await started.wait()


@contextlib.asynccontextmanager
async def engines(url: str, options: argparse.Namespace) -> AsyncIterator[list[tuple[str, str]]]:
    """Yield the gRPC and HTTP address of each simulated engine."""
    async with contextlib.AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(
                process(sys.executable, ENGINE_SCRIPT, f"--url={url}", f"--run={RUN}", f"--replica-id=engine-{number}",
                        f"--tokens={options.tokens}")
            )
            for number in range(options.engines)
        ]  # fmt: skip
        addresses = []
        for engine in started:
            assert engine.stdout is not None
            grpc_address, http_address = (await engine.stdout.readline()).decode().split()
            addresses.append((grpc_address, http_address))
        yield addresses


@contextlib.asynccontextmanager
async def penstock_router(
    url: str, num_engines: int, *, log_level: str = "warning"
) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Yield address and process of a router that sees all engines."""
    [port] = free_ports(1)
    overrides = (f"--bus.url={url}", f"--run.name={RUN}", f"--router.port={port}", f"--log.level={log_level}")
    async with process(sys.executable, "-P", "-m", "services.cli", "serve", "router", *overrides) as started:
        address = f"127.0.0.1:{port}"
        async with RouterClient(address) as client, asyncio.timeout(30.0):
            while True:
                with contextlib.suppress(PenstockError):
                    if len((await client.list_replicas()).replicas) == num_engines:
                        break
                await asyncio.sleep(0.1)
        yield address, psutil.Process(started.pid)


@contextlib.asynccontextmanager
async def sglang_router(
    python: Path, workers: list[str], session: aiohttp.ClientSession
) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Yield address and process of an sglang-router whose workers are the engines' HTTP sides."""
    port, metrics_port = free_ports(2)
    async with process(
        *(python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", port),
        *("--prometheus-port", metrics_port, "--policy", "round_robin", "--log-level", "error"),
        *("--max-concurrent-requests", "8192", "--worker-urls", *(f"http://{worker}" for worker in workers)),
    ) as started:
        address = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(60.0):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.post(f"{address}/generate", json=http_request(0.0, 1, [1])) as response:
                        if response.status == 200:
                            break
                await asyncio.sleep(0.2)
        yield address, psutil.Process(started.pid)


def http_request(latency_s: float, num_tokens: int, prompt: list[int]) -> dict[str, object]:
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": latency_s, "max_new_tokens": num_tokens},
        "return_logprob": True,
        "stream": False,
    }


@contextlib.asynccontextmanager
async def subjects(options: argparse.Namespace) -> AsyncIterator[list[Subject]]:
    """Yield all subjects."""
    prompt, num_tokens = list(range(1, options.prompt + 1)), options.tokens
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = await stack.enter_async_context(local_server(folder))
        addresses = await stack.enter_async_context(engines(url, options))
        address, router = await stack.enter_async_context(penstock_router(url, len(addresses)))
        direct = [await stack.enter_async_context(GenerateClient(each)) for each, _ in addresses]
        proxied = await stack.enter_async_context(GenerateClient(address))
        routed = await stack.enter_async_context(RoutedGenerateClient(address))
        turns = itertools.count()

        async def call_directly(session: str, latency_s: float) -> None:
            client = direct[next(turns) % len(direct)]
            await client.generate(request_of(session, latency_s, num_tokens, prompt), timeout_s=TIMEOUT_S)

        async def stream_directly(session: str, latency_s: float) -> None:
            client = direct[next(turns) % len(direct)]
            request = request_of(session, latency_s, num_tokens, prompt)
            async with contextlib.aclosing(client.stream(request, timeout_s=TIMEOUT_S)) as chunks:
                async for _ in chunks:
                    pass

        async def call_proxied(session: str, latency_s: float) -> None:
            await proxied.generate(request_of(session, latency_s, num_tokens, prompt), timeout_s=TIMEOUT_S)

        async def call_routed(session: str, latency_s: float) -> None:
            await routed.generate(request_of(session, latency_s, num_tokens, prompt), timeout_s=TIMEOUT_S)

        compared = [
            Subject(name="direct", call=call_directly, baseline="direct"),
            Subject(name="direct, streamed", call=stream_directly, baseline="direct, streamed"),
            Subject(name="penstock, proxied", call=call_proxied, baseline="direct", router=router),
            Subject(name="penstock, Route", call=call_routed, baseline="direct", router=router),
        ]
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
            )
        )

        async def post(base: str, latency_s: float) -> None:
            async with http.post(f"{base}/generate", json=http_request(latency_s, num_tokens, prompt)) as response:
                response.raise_for_status()
                assert len((await response.json())["output_ids"]) == num_tokens

        async def post_directly(session: str, latency_s: float) -> None:
            await post(f"http://{addresses[next(turns) % len(addresses)][1]}", latency_s)

        if options.sglang_router is None:
            sys.stderr.write("sglang-router is left out; name a Python that has it with --sglang-router\n")
        else:
            workers = [http_address for _, http_address in addresses]
            sglang, sglang_process = await stack.enter_async_context(
                sglang_router(options.sglang_router, workers, http)
            )

            async def post_proxied(session: str, latency_s: float) -> None:
                await post(sglang, latency_s)

            compared.append(Subject(name="direct, HTTP", call=post_directly, baseline="direct, HTTP"))
            compared.append(
                Subject(name="sglang-router", call=post_proxied, baseline="direct, HTTP", router=sglang_process)
            )
        yield compared
