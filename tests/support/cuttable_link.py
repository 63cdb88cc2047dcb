"""A TCP link between a client and a server that is slow, or breaks in the middle of a message, on command."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self
from urllib.parse import urlsplit

from penstock.runtime.process import end_task

_BLOCK_BYTES = 4096
_CATCH_UP_S = 1.0
"""Late wake-ups of a busy machine do not add up: a slow link makes up for so many seconds, also after a rest."""


class CuttableLink:
    """Forwards connections to a server."""

    def __init__(self, host: str, port: int) -> None:
        """Use `to`."""
        self.url = ""
        """Where clients connect."""
        self.num_cuts = 0
        self.num_bytes = 0
        """Bytes from the server that it has carried."""
        self.bytes_per_s = math.inf
        """How many of them it carries in a second, over each connection."""
        self._target = (host, port)
        self._bytes_left: int | None = None
        self._may_carry = asyncio.Event()
        self._may_carry.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def to(cls, url: str) -> AsyncIterator[Self]:
        """A link to the server at `url`, during the context."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        link = cls(parts.hostname, parts.port)
        server = await asyncio.start_server(link._accept, "127.0.0.1", 0)
        link.url = f"{parts.scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield link
        finally:
            server.close()
            for task in list(link._tasks):
                await end_task(task)

    def cut_after(self, num_bytes: int) -> None:
        """Break the connection that carries this many more bytes from the server, and only that one."""
        self._bytes_left = num_bytes

    def silence(self) -> None:
        """Have the connections that there are carry nothing more, in either direction; nobody is told."""
        self._may_carry.clear()
        self._may_carry = asyncio.Event()  # of those to come
        self._may_carry.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        from_server, to_server = await asyncio.open_connection(*self._target)
        may_carry = self._may_carry
        sending = asyncio.create_task(self._forward(reader, to_server, may_carry))
        try:
            await self._deliver(from_server, writer, may_carry)
        finally:
            await end_task(sending)
            for each in (writer, to_server):
                each.transport.abort()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may_carry: asyncio.Event
    ) -> None:
        while data := await reader.read(_BLOCK_BYTES):
            await may_carry.wait()
            writer.write(data)
            await writer.drain()

    async def _deliver(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may_carry: asyncio.Event
    ) -> None:
        loop = asyncio.get_running_loop()
        due_at = loop.time()
        while data := await reader.read(_BLOCK_BYTES):
            await may_carry.wait()
            if self._bytes_left is not None:
                self._bytes_left -= len(data)
                if self._bytes_left < 0:
                    self._bytes_left = None
                    self.num_cuts += 1
                    return
            writer.write(data)
            await writer.drain()
            self.num_bytes += len(data)
            due_at = max(due_at, loop.time() - _CATCH_UP_S) + len(data) / self.bytes_per_s
            await asyncio.sleep(max(0.0, due_at - loop.time()))
