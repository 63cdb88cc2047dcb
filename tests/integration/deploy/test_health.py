"""`python3 -m penstock.runtime.health`, which containers ask: against a real server."""

import asyncio
import os
import sys

import pytest

from penstock.config import SecurityConfig
from penstock.rpc.server import RpcServer
from penstock.runtime.ports import free_ports
from penstock.runtime.security import Security
from tests.support.certificates import security_of


async def ask(address: str, *arguments: str, **environment: str) -> tuple[int | None, str]:
    """Exit code and output of the health check; where it says nothing else, the last line of its error."""
    command = [sys.executable, "-m", "penstock.runtime.health", address, "--timeout-s", "20", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=os.environ | environment
    )
    output, error = await process.communicate()
    return process.returncode, (output or error).decode().strip().rpartition("\n")[2]


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


async def test_a_proxy_of_the_environment_is_not_asked() -> None:
    """Docker hands the client's proxies to containers; a health check that went there would be red for good."""
    (nobody,) = free_ports(1)
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), f"http://127.0.0.1:{nobody}")
    server = RpcServer(host="127.0.0.1", port=0)
    await server.start()
    try:
        assert await ask(server.address, **proxies, no_proxy="", no_grpc_proxy="") == (0, "SERVING")
    finally:
        await server.drain(0.0)


async def test_a_server_with_mutual_tls(certificates: SecurityConfig) -> None:
    """It answers who shows a certificate of its authority, and nobody else."""
    security = security_of(certificates.model_copy(update={"mutual": True}))
    server = RpcServer(host="127.0.0.1", port=0, security=security)
    await server.start()
    authority = ("--tls-ca", str(certificates.tls_ca))
    own = ("--tls-cert", str(certificates.tls_cert), "--tls-key", str(certificates.tls_key))
    try:
        assert await ask(server.address, *authority, *own) == (0, "SERVING")
        assert await ask(server.address, *authority) == (1, "UNAVAILABLE")
        assert await ask(server.address, *authority, *own, "--tls-server-name", "penstock") == (0, "SERVING")
        assert await ask(server.address, *authority, *own, "--tls-server-name", "another") == (1, "UNAVAILABLE")
        assert await ask(server.address) == (1, "UNAVAILABLE")
    finally:
        await server.drain(0.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tls-cert", "a", "--tls-key", "b"), "--tls-cert needs --tls-ca"),
        (("--tls-ca", "a", "--tls-cert", "b"), "--tls-cert and --tls-key go together"),
        (("--tls-server-name", "penstock"), "--tls-server-name needs --tls-ca"),
        (("--tls-ca", "nowhere.pem"), "nowhere.pem cannot be read: No such file"),
    ],
)
async def test_half_of_what_tls_needs_is_a_mistake(arguments: tuple[str, ...], said: str) -> None:
    """Not a question in plain text, which a server with TLS never answers."""
    code, line = await ask("127.0.0.1:1", *arguments)
    assert code == 2
    assert said in line
