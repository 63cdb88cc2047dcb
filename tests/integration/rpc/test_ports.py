"""A port that is chosen before its server starts is the server's when it starts."""

import asyncio
import socket
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse

from penstock.bus.local_server import local_server
from penstock.errors import SetupError
from penstock.http.server import HttpServer
from penstock.rpc.server import RpcServer
from penstock.runtime import ports
from penstock.runtime.ports import free_ports, held_ports, require_free_port

HOSTS = ("127.0.0.1", "0.0.0.0")


def test_port_in_use_is_not_free() -> None:
    """A port on which somebody listens is not handed out."""
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as server:
        for _ in range(3):
            assert server.getsockname()[1] not in free_ports(50)


def test_held_port_is_given_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by this process nor by another program that looks for a free one; afterwards it is free again."""
    with held_ports(1) as (port,):
        monkeypatch.setattr(ports, "_PORTS", range(port, port + 1))
        with pytest.raises(SetupError, match="no 1 free ports"):
            free_ports(1)
        for host in HOSTS:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((host, port))
    assert free_ports(1) == [port]


@pytest.mark.parametrize("host", HOSTS)
async def test_servers_listen_on_a_held_port(host: str, tmp_path: Path) -> None:
    """Every kind of server that is told a held port gets it, and again after it died."""
    with held_ports(1) as (port,):
        for _ in range(2):
            require_free_port(host, port, key="rollout.port")
            rpc = RpcServer(host=host, port=port)
            assert await rpc.start() == port
            await rpc.drain(0.0)
            http = HttpServer(PlainTextResponse("hello"), host=host, port=port)
            assert await http.start() == port
            await http.drain(0.0)
            async with await asyncio.start_server(lambda _, writer: writer.close(), host, port):
                pass
            async with local_server(tmp_path, host=host, port=port) as url:
                assert url.endswith(f":{port}")
