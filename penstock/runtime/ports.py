"""Finds and checks ports, before something slow or a foreign program tries to listen on them."""

import random
import socket

from penstock.errors import SetupError

_PORTS = range(15_000, 32_000)
"""Below the range of outgoing connections, so that none of them takes a port before its server does."""


def require_free_port(host: str, port: int, *, key: str) -> None:
    """Check that `port` can be listened on; 0, which takes any free port, always can.

    Raises:
        SetupError: it cannot; `key` is the setting to change.
    """
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SetupError(f"{key}: cannot listen on {host}:{port}: {error.strerror}; choose another port") from None


def free_ports(count: int) -> list[int]:
    """Distinct ports that nobody listens on at the moment.

    Raises:
        SetupError: there are too few.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(ports) == count:
            return ports
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
    raise SetupError(f"no {count} free ports between {_PORTS.start} and {_PORTS.stop}; give them in the recipe")
