"""The NATS of a run: whether the run can have it, and where the run's own one listens."""

import socket
from collections.abc import Callable

from penstock.bus.connection import connect
from penstock.bus.local_server import require_unserved_store
from penstock.config import NetworkConfig
from penstock.errors import SetupError
from penstock.runtime.ports import held_port
from penstock.runtime.security import Security, is_loopback
from services.launch.run_folder import RunFolder
from services.launch.run_plan import LOCAL
from services.recipe import Recipe


async def require_bus(recipe: Recipe, folder: RunFolder, security: Security) -> None:
    """Return once the NATS that the recipe names has answered; without one in it, once the run can start its own.

    Every process would find out by itself, after it has imported its libraries.

    Raises:
        AccessError: it refuses the token.
        SetupError: it does not answer, or has no JetStream; another server serves the store of the run's own.
    """
    if recipe.bus.url:
        async with connect(recipe.bus, run=recipe.run.name, security=security):
            pass
    else:
        await require_unserved_store(folder.nats)


def bus_host(network: NetworkConfig) -> str:
    """Return where the run's own NATS listens: where other hosts reach it, if they reach this run's services at all.

    Raises:
        SetupError: the name under which others reach them is not this machine's.
    """
    if is_loopback(network.host):
        return LOCAL
    host = network.advertised
    try:
        with held_port(host, 0, key="network.advertise_host"):
            return host
    except SetupError:
        raise SetupError(
            f"the run's NATS cannot listen on {host}; give --network.advertise_host=, a name or address of this "
            "machine under which others reach it"
        ) from None


def reach_of(host: str, *, resolve: Callable[[str], str] = socket.gethostbyname) -> list[str]:
    """Return a line for a person if the run's own NATS listens under a name by which only this machine finds it.

    Debian writes the machine's name into /etc/hosts in this way, and a run on one machine does well with it.

    Args:
        host: From `bus_host`.
        resolve: Returns the IPv4 address of a host. Raises OSError if it has none.
    """
    try:
        address = resolve(host)
    except OSError:
        return []
    if is_loopback(host) or not is_loopback(address):
        return []
    return [
        f"no other host reaches the run's NATS: here, {host} leads to {address}; if one must, correct /etc/hosts, or "
        "give --network.advertise_host=, an address of this machine"
    ]
