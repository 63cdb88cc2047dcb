"""The ports of a run that its hosts must reach, and how one host finds out whether it reaches another's.

Each host says a greeting on its ports, so that an answer of some other program or host is not taken for it. A port on
which a program listens already, such as that of a nats-server, has no greeting: it counts as reached if it takes
connections.
"""

import contextlib
import errno
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pydantic

from penstock.errors import ConfigError
from services.recipe import Recipe

ANY: Final = "any free port"
"""In place of a setting: engines, pushes and pairs of engines take ports that no setting names."""
MAX_PORTS: Final = 16
MARKER: Final = r"^[0-9a-f]{32}$"
"""Of what a host recognises its own by."""

_CONNECT_TIMEOUT_S: Final = 5.0


class OpenPort(pydantic.BaseModel):
    """A port on which a host can be reached."""

    port: int = pydantic.Field(ge=1, le=65535)
    greeting: str = pydantic.Field(pattern=rf"^$|{MARKER}")
    """What is said there; empty: a program of the host listens there already."""


def engine_ports(recipe: Recipe) -> dict[str, int]:
    """Return the ports of a host that has engines, by setting; 0 is any free one."""
    rollout = recipe.rollout
    fixed = {"rollout.port": rollout.port} if rollout.port else {}
    has_pairs = rollout.prefill > 0 or rollout.decode > 0 or rollout.role != "unified"
    has_groups = recipe.trainer.weight_sync.transport != "delta"  # every other one may have to broadcast
    return {**fixed, ANY: 0} if has_groups or has_pairs or not fixed else fixed


def server_ports(recipe: Recipe) -> dict[str, int]:
    """Return the ports of a host that has engines, and those servers that the recipe does not place on another host.

    Blocking: it looks for the addresses of names.
    """
    worker, router, reward = recipe.worker, recipe.router, recipe.reward
    found = {"bus.url": next((port for host, port in recipe.bus.addresses if _is_here(host)), 0)}
    if _is_here(worker.router_address.rpartition(":")[0]):
        found |= {"router.port": router.port, "router.http_port": router.http_port or 0}
    if _is_here(worker.reward_address.rpartition(":")[0]):
        found["reward.port"] = reward.port
    if recipe.slurm.gpus_per_node:  # the other nodes wait for the trainer's end
        found["trainer.port"] = recipe.trainer.port
    return {key: port for key, port in found.items() if port} | engine_ports(recipe)


def _is_here(host: str) -> bool:
    """Return whether a name or an address is this machine's; an empty one is."""
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def greeting(host: str, ports: Mapping[str, int], text: str) -> Iterator[dict[str, OpenPort]]:
    """Say `text` on these ports of `host` during the context, if no program listens there; yield all of them.

    Raises:
        ConfigError: this host cannot listen on one of them.
    """
    found: dict[str, OpenPort] = {}
    with contextlib.ExitStack() as stack:
        for key, port in ports.items():
            try:
                listener = stack.enter_context(socket.create_server((host, port)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    what = f"network.host = {host!r}" if not port else f"{key}: {host}:{port}"
                    raise ConfigError(f"{what}: cannot listen there: {error.strerror}; correct it") from None
                found[key] = OpenPort(port=port, greeting="")
            else:
                stack.callback(listener.shutdown, socket.SHUT_RDWR)  # wakes the thread
                threading.Thread(target=_greet, args=(listener, text), daemon=True).start()
                found[key] = OpenPort(port=listener.getsockname()[1], greeting=text)
        yield found


def _greet(listener: socket.socket, text: str) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # it is closed
            return
        with connection, contextlib.suppress(OSError):
            connection.sendall(text.encode())


def reach_all(host: str, ports: Mapping[str, OpenPort]) -> dict[str, str]:
    """Connect to all ports of a host at once; return why each was not reached, or an empty text. Blocking."""
    if not ports:
        return {}
    with ThreadPoolExecutor(max_workers=len(ports)) as pool:
        return dict(zip(ports, pool.map(lambda each: reach(host, each), ports.values()), strict=True))


def reach(host: str, port: OpenPort) -> str:
    """Connect to a port of a host; return why it was not reached, or an empty text."""
    try:
        with socket.create_connection((host, port.port), _CONNECT_TIMEOUT_S) as connection:
            connection.settimeout(_CONNECT_TIMEOUT_S)
            heard = connection.makefile("rb").read(len(port.greeting))
    except OSError as error:
        return error.strerror or str(error)
    return "" if heard == port.greeting.encode() else "another program answers there"
