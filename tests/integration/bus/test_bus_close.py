"""A connection to NATS that is closed, or given up half-way, leaves nothing that runs: no task and no socket."""

import asyncio
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.protocol.parser import Parser

from penstock.bus.connection import connect
from penstock.bus.local_server import local_server
from penstock.bus.nats_client import _close_quietly
from penstock.config import BusConfig
from tests.support.waiting import HANG_S, until

_INFO = b'INFO {"server_id":"x","version":"2.11.0","proto":1,"headers":true,"max_payload":1048576,"jetstream":true}\r\n'


async def test_closing_beside_a_server_that_is_gone_ends_every_task(tmp_path: Path) -> None:
    """Also with data that was not sent, where the client's own closing breaks off."""
    before = asyncio.all_tasks()
    async with local_server(tmp_path) as url, asyncio.timeout(HANG_S):
        context = connect(BusConfig(url=url), run="r")
        bus = await context.__aenter__()
    client = bus.jetstream._nc
    await until(lambda: client.is_reconnecting)
    await client.publish("subject", b"never sent")
    await context.__aexit__(None, None, None)
    assert asyncio.all_tasks() == before


async def test_connecting_that_is_cancelled_closes_the_connection() -> None:
    """When the server has let the client in, and says no more."""
    asked, left = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_INFO)
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
            if b"$JS.API.INFO" in line:
                asked.set()
        writer.close()
        left.set()

    async def use(url: str) -> None:
        async with connect(BusConfig(url=url), run="r"):
            pytest.fail("the server says nothing of JetStream")

    before = asyncio.all_tasks()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, asyncio.timeout(HANG_S):
        host, port = server.sockets[0].getsockname()
        using = asyncio.create_task(use(f"nats://{host}:{port}"))
        await asked.wait()
        using.cancel()
        await asyncio.wait({using})
        await left.wait()
    assert asyncio.all_tasks() == before


async def test_a_connection_that_breaks_while_it_is_closed_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """nats-py starts to reconnect when it reads the end of a stream, also while its tasks are being ended."""

    async def wait() -> None:
        await asyncio.Event().wait()

    async def read() -> None:
        try:
            await wait()
        except asyncio.CancelledError:
            await client._process_op_err(EOFError())

    async def break_off() -> None:
        raise BrokenPipeError

    before = asyncio.all_tasks()
    client = Client()
    client.options = {"allow_reconnect": True}
    client._status = Client.CONNECTED
    client._ps = Parser(client)
    monkeypatch.setattr(client, "_attempt_reconnect", wait)
    monkeypatch.setattr(client, "close", break_off)
    client._reading_task = asyncio.create_task(read())
    await asyncio.sleep(0)
    async with asyncio.timeout(HANG_S):
        await _close_quietly(client)
    assert asyncio.all_tasks() == before
