"""`python3 -m penstock.health`, which containers ask: against a real server."""

import asyncio
import sys

import pytest

from penstock.ports import free_ports
from penstock.rpc.server import RpcServer
from penstock.security import Security


async def ask(address: str) -> tuple[int | None, str]:
    """Exit code and output of the health check."""
    command = [sys.executable, "-m", "penstock.health", address, "--timeout-s", "20"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return process.returncode, output.decode().strip()


@pytest.mark.parametrize("token", ["", "secret"])
async def test_a_server_is_healthy_until_it_drains(token: str) -> None:
    """0 while it takes work, 1 when it takes no more; a token is not asked for."""
    server = RpcServer(host="127.0.0.1", port=0, security=Security(token=token))
    await server.start()
    try:
        assert await ask(server.address) == (0, "SERVING")
        await server.set_serving(False)
        assert await ask(server.address) == (1, "NOT_SERVING")
    finally:
        await server.drain(0.0)


async def test_where_nobody_listens_it_is_not_healthy() -> None:
    """And it says so at once, without a traceback."""
    (port,) = free_ports(1)
    assert await ask(f"127.0.0.1:{port}") == (1, "UNAVAILABLE")
