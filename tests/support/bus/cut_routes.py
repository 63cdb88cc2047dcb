"""The routes between the servers of a cluster, which a test cuts: a server that lives on, alone, is the result."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import psutil

from penstock.runtime.ports import free_ports
from penstock.runtime.process import end_task
from penstock.testing.local_cluster import ClusterServer, LocalCluster

_BLOCK_BYTES = 65_536


class Routes:
    """Forwards the routes of a cluster's servers to each other."""

    def __init__(self, size: int) -> None:
        """Use `open`."""
        self.ports = free_ports(size)
        """Where servers reach each other, by number."""
        self._cluster: LocalCluster | None = None
        self._alone: ClusterServer | None = None
        self._links: dict[asyncio.Task[None], tuple[int, int]] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls, size: int) -> AsyncIterator[Self]:
        """Forward during the context; `lead` says to which servers."""
        routes = cls(size)

        def acceptor(number: int):
            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await routes._accept(number, reader, writer)

            return accept

        listeners = [
            await asyncio.start_server(acceptor(number), "127.0.0.1", port) for number, port in enumerate(routes.ports)
        ]
        try:
            yield routes
        finally:
            for listener in listeners:
                listener.close()
            for task in list(routes._links):
                await end_task(task)

    def lead(self, cluster: LocalCluster) -> None:
        """Forward to the servers of `cluster`, in their order."""
        self._cluster = cluster

    def cut(self, server: ClusterServer) -> None:
        """Break all routes from and to the server, and let none come up again."""
        self._alone = server
        for task, ends in self._links.items():
            if self._number_of(server) in ends:
                task.cancel()

    def mend(self) -> None:
        """Let all servers reach each other again."""
        self._alone = None

    def _number_of(self, server: ClusterServer) -> int:
        assert self._cluster is not None
        return list(self._cluster.servers).index(server)

    async def _accept(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, ends = asyncio.current_task(), (self._caller(writer.get_extra_info("peername")[1]), number)
        assert task is not None
        if self._cluster is None or (self._alone is not None and self._number_of(self._alone) in ends):
            writer.transport.abort()
            return
        self._links[task] = ends
        task.add_done_callback(lambda done: self._links.pop(done, None))
        onward = None
        try:
            there, onward = await asyncio.open_connection("127.0.0.1", self._cluster.servers[number].route_port)
            sending = asyncio.create_task(_forward(reader, onward))
            try:
                await _forward(there, writer)
            finally:
                await end_task(sending)
        except (OSError, asyncio.CancelledError):
            pass  # the server is away, or this route was cut
        finally:
            for each in (writer, onward):
                if each is not None:
                    each.transport.abort()

    def _caller(self, port: int) -> int:
        """Return the number of the server whose connection has this local port; -1 if it is gone already."""
        servers = () if self._cluster is None else self._cluster.servers
        for number, server in enumerate(servers):
            if server.process is not None and any(
                each.laddr and each.laddr.port == port for each in psutil.Process(server.pid).net_connections("tcp")
            ):
                return number
        return -1


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_BLOCK_BYTES):
        writer.write(data)
        await writer.drain()


def server_of(pid: int, cluster: LocalCluster) -> ClusterServer:
    """Return the server to which a process is connected."""
    ports = {each.raddr.port for each in psutil.Process(pid).net_connections("tcp") if each.raddr}
    return next(server for server in cluster.servers if int(server.url.rpartition(":")[2]) in ports)
