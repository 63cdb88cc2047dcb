"""Finds, holds and checks ports before a slow or foreign server listens on them."""

import errno
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from penstock.errors import SetupError

_PORTS = range(15_000, 32_000)
"""Below the range of outgoing connections, so that none of them takes a port before its server does."""


def require_free_port(host: str, port: int, *, key: str) -> None:
    """Check that a server can listen on `port`; 0, which takes any free port, always passes.

    Raises:
        SetupError: it cannot; the message names `key`, the setting to change.
    """
    if port != 0:
        with held_port(host, port, key=key):
            pass


@contextmanager
def held_port(host: str, port: int, *, key: str) -> Iterator[None]:
    """Hold the port of a setting during the context: its server can listen on it, but no other process gets it.

    Several processes may hold it at once, as long as none listens; connections of an earlier server do not matter.

    Raises:
        SetupError: a process listens on it, or the host is not this machine's; `key` is the setting to change.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((host, port))
        except OSError as error:
            raise SetupError(f"{key}: cannot listen on {host}:{port}: {error.strerror}; choose another port") from None
        yield


@contextmanager
def held_ports(count: int, *, host: str = "127.0.0.1") -> Iterator[list[int]]:
    """Hold distinct free ports of `host` during the context: a server that is given one can listen on it, no other
    gets it.

    Each port is bound but not listened on, with SO_REUSEADDR set after the bind. A server that sets SO_REUSEADDR, as
    gRPC, asyncio and nats-server do, may then bind and listen. A process that probes without it, as this function and
    SGLang do, finds the port taken.

    Raises:
        SetupError: there are not enough free ports, or `host` is not an address of this machine.
    """
    with ExitStack() as held:
        ports: list[int] = []
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            if len(ports) == count:
                break
            holder = socket.socket()
            try:
                holder.bind((host, port))
            except OSError as error:
                holder.close()
                if error.errno == errno.EADDRNOTAVAIL:
                    raise SetupError(f"{host} is not an address of this machine") from None
                continue
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.enter_context(holder)
            ports.append(port)
        if len(ports) < count:
            raise SetupError(f"no {count} free ports between {_PORTS.start} and {_PORTS.stop}; give them in the recipe")
        yield ports


def free_ports(count: int) -> list[int]:
    """Return distinct ports without a listener at the moment; if a server takes one later, hold it (`held_ports`).

    Raises:
        SetupError: there are not enough free ports.
    """
    with held_ports(count) as ports:
        return ports
