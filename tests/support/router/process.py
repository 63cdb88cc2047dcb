"""A router with its OpenAI-compatible frontend, as a process of its own."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.waiting import promptly

_START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class RouterProcess:
    """Where it listens."""

    address: str
    """host:port of gRPC."""
    url: str
    """http://host:port."""
    process: asyncio.subprocess.Process


@contextlib.asynccontextmanager
async def router_process(nats_url: str, run: str, model_path: Path, *settings: str) -> AsyncIterator[RouterProcess]:
    """`penstock serve router` with `settings` such as --run.grace_s=0, until the context ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", "serve", "router", "--log.format=json", "--router.http_port=0",
        f"--bus.url={nats_url}", f"--run.name={run}", f"--model.path={model_path}", *settings,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    reading: asyncio.Task[None] | None = None
    try:
        addresses, lines = list[str](), list[str]()
        async with asyncio.timeout(_START_TIMEOUT_S):
            while len(addresses) < 2:
                line = (await process.stderr.readline()).decode()
                assert line, "the router did not start:\n" + "".join(lines)
                lines.append(line)
                record = json.loads(line) if line.startswith("{") else {}
                if record.get("event") == "server.started":
                    addresses.append(record["address"])
        reading = asyncio.create_task(_pass_on(process.stderr))
        yield RouterProcess(address=addresses[0], url=addresses[1], process=process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await promptly(process.wait())
        if reading is not None:
            await reading


async def _pass_on(stream: asyncio.StreamReader) -> None:
    """Write the router's log to this process's: a test that fails shows what was said while it ran."""
    while line := await stream.readline():
        sys.stderr.write(line.decode())
