"""Simulated engines in processes of their own, to be killed."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator

from penstock.bus.connection import Bus


@contextlib.asynccontextmanager
async def engine_process(
    bus: Bus, run: str, replica_id: str, *, role: str = "", delay_s: float = 0.0, token_s: float = 0.0
) -> AsyncIterator[asyncio.subprocess.Process]:
    """One that serves during the context, unless it is killed before; with `role` (prefill, decode) half of a pair."""
    module = ("tests.simulated_pair", f"--role={role}") if role else ("tests.simulated_engine",)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", *module, f"--url={bus.config.url}", f"--run={run}", f"--replica-id={replica_id}"),
        *(f"--delay-s={delay_s}", f"--token-s={token_s}"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert await asyncio.wait_for(process.stdout.readline(), 30.0)
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()
