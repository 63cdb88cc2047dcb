"""Real nats-servers that form a cluster on this machine, which tests kill, freeze and cut off."""

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from penstock.bus.local_server import server_command
from penstock.runtime.children.parent_death import dying_with_parent
from penstock.runtime.ports import held_ports
from penstock.testing.freezing import freeze, thaw

_CLUSTER = """\
cluster {{
  name: "penstock"
  listen: "127.0.0.1:{port}"
  advertise: "127.0.0.1:{advertised}"
  routes: [{routes}]
}}
"""
_NAME = re.compile(r"^server_name: .*$", re.MULTILINE)
_JETSTREAM = re.compile(r"^jetstream .*$", re.MULTILINE)


@dataclass(slots=True)
class ClusterServer:
    """One nats-server of the cluster."""

    name: str
    url: str
    """Where clients connect."""
    route_port: int
    """Where the other servers' routes arrive."""
    command: Sequence[str]
    log: Path
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Start it, on what it stored before."""
        self.process = subprocess.Popen(
            [*self.command, "--log", str(self.log)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=dying_with_parent(),
        )

    @property
    def pid(self) -> int:
        """Its process id; fails if it does not run."""
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def freeze(self) -> None:
        """SIGSTOP: its connections stay open, and nothing is answered."""
        freeze(self.pid)

    def thaw(self) -> None:
        """SIGCONT."""
        thaw(self.pid)


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """The servers of one cluster."""

    servers: Sequence[ClusterServer] = field(default_factory=list)

    @property
    def url(self) -> str:
        """bus.url: all servers, with commas between them."""
        return ",".join(server.url for server in self.servers)

    def named(self, name: str) -> ClusterServer:
        """Return the server of this name, which JetStream gives for leaders."""
        return next(server for server in self.servers if server.name == name)


@contextmanager
def local_cluster(
    folder: Path, *, size: int = 3, route_ports: Sequence[int] = (), without_jetstream: int = 0
) -> Iterator[LocalCluster]:
    """Run a cluster of nats-servers during the context, each with its store in a folder of its own below `folder`.

    Args:
        folder: Gets stores and logs.
        size: Number of servers.
        route_ports: A port for each server under which the others reach it, where something forwards to its
            `route_port`; empty: they reach it there itself.
        without_jetstream: How many of them, the last ones, run without JetStream.
    """
    with held_ports(2 * size) as ports:
        clients, routes = ports[:size], ports[size:]
        advertised = list(route_ports) or routes
        servers = []
        for number, (client_port, route_port) in enumerate(zip(clients, routes, strict=True)):
            home = folder / f"nats-{number}"
            command = server_command(home, port=client_port)
            config = home / "nats.conf"
            text = config.read_text()
            text = _NAME.sub(f'server_name: "{home.name}"', text)
            if number >= size - without_jetstream:
                text = _JETSTREAM.sub("", text)
            others = (f'"nats://127.0.0.1:{port}"' for index, port in enumerate(advertised) if index != number)
            text += _CLUSTER.format(port=route_port, advertised=advertised[number], routes=", ".join(others))
            config.write_text(text)
            url = f"nats://127.0.0.1:{client_port}"
            servers.append(ClusterServer(home.name, url, route_port, command.arguments, home / "nats.log"))
        try:
            for server in servers:
                server.start()
            yield LocalCluster(servers)
        finally:
            for server in servers:
                if server.process is not None:
                    server.kill()
