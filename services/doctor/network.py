"""Checks ports, host names, and an external NATS server."""

import ipaddress
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from urllib.parse import urlsplit

from penstock.config.nats_url import address_of
from penstock.errors import ConfigError, SetupError
from penstock.runtime.ports import require_free_port
from services.doctor.finding import Finding, blamed, fault, ok, warning
from services.launch.on_ray.placement import AT_THE_LAUNCHER
from services.launch.run_plan import PORTS, SERVING, require_different_ports
from services.recipe import Recipe

CONNECT_TIMEOUT_S = 3.0
OWN_NAME = "this machine's name"
"""Stands for the setting if network.advertise_host is empty."""


def check_ports(recipe: Recipe) -> Finding:
    """Check that a server can listen on each port that the recipe names, and that no two of one host have the same."""
    found = [(f"{section}.{name}", getattr(getattr(recipe, section), name)) for section, name in PORTS]
    fixed = [(key, port) for key, port in found if port]
    try:
        for services in _on_one_host(recipe):
            require_different_ports(recipe, services)
        for key, port in fixed:
            require_free_port(recipe.network.host, port, key=key)
    except (ConfigError, SetupError) as error:
        return blamed("ports", error)
    try:
        require_different_ports(recipe, SERVING)
    except ConfigError as error:
        of_several_hosts = blamed("ports", error)
        return warning("ports", of_several_hosts.seen, f"if both run on one host, {of_several_hosts.remedy}")
    return ok("ports", ", ".join(f"{key} = {port} is free" for key, port in fixed) or "each process takes a free one")


def _on_one_host(recipe: Recipe) -> Iterator[Collection[str]]:
    """Yield the services of each host, as far as the recipe says which ones share it."""
    if recipe.launch.backend == "ray":
        yield AT_THE_LAUNCHER
    elif recipe.slurm.gpus_per_node:
        yield "reward", "router", "trainer"  # on the first node
    else:
        worker = recipe.worker
        addresses = {"router": worker.router_address, "reward": worker.reward_address}
        hosts = {service: address.rpartition(":")[0] for service, address in addresses.items()}
        for host in {"", *hosts.values()}:  # "": where no address says otherwise
            yield [service for service in SERVING if hosts.get(service, "") == host]


def hosts_of(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the settings that name hosts, each with its host."""
    network = recipe.network
    if network.advertised != network.host:
        yield "network.advertise_host" if network.advertise_host else OWN_NAME, network.advertised
    for host, _ in recipe.bus.addresses:
        yield "bus.url", host
    for key, address in (
        ("worker.router_address", recipe.worker.router_address),
        ("worker.reward_address", recipe.worker.reward_address),
    ):
        if address:
            yield key, address.rpartition(":")[0].strip("[]")
    if recipe.worker.router_url:
        yield "worker.router_url", urlsplit(recipe.worker.router_url).hostname or recipe.worker.router_url
    if recipe.reward.remote.url:
        yield "reward.remote.url", urlsplit(recipe.reward.remote.url).hostname or recipe.reward.remote.url


def check_hosts(hosts: Sequence[tuple[str, str]], resolve: Callable[[str], Sequence[str]]) -> Finding:
    """Check that the hosts have addresses, and that the advertised name does not lead other machines to themselves.

    Args:
        hosts: As `hosts_of` yields them.
        resolve: Returns the addresses of a host. Raises OSError if it has none.
    """
    for key, host in hosts:
        try:
            addresses = resolve(host)
        except OSError as error:
            reason = error.strerror or str(error)
            return fault(
                "hosts",
                f"{key}: {host!r} has no address ({reason})",
                "correct the name, or add it to DNS or /etc/hosts",
            )
        if key == OWN_NAME and all(ipaddress.ip_address(each).is_loopback for each in addresses):
            return warning(
                "hosts",
                f"others are told to reach this machine as {host!r}, which is {addresses[0]}: themselves",
                "give --network.advertise_host=, a name or address under which others reach this machine",
            )
    return ok("hosts", ", ".join(f"{key} {host}" for key, host in hosts) or "all on this machine")


def resolve(host: str) -> list[str]:
    """Return the addresses of `host`, of any family.

    Raises:
        OSError: the host has no address.
    """
    return sorted({str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(host, None)})


def check_bus(servers: Sequence[str], connect: Callable[[tuple[str, int], float], socket.socket]) -> Finding | None:
    """Check that the servers in bus.url listen; None if the run starts its own server.

    Args:
        servers: The URLs in bus.url.
        connect: Connects to (host, port) within the given seconds. Raises OSError.
    """
    if not servers:
        return None
    silent: list[str] = []
    for url in servers:
        try:
            connect(address_of(url), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            silent.append(f"{url!r} does not answer: {error.strerror or error}")
    if len(silent) == len(servers):
        return fault(
            "bus",
            f"bus.url = {'; '.join(silent)}",
            "start it first (`penstock serve nats`), or leave bus.url out, and `penstock train` starts its own",
        )
    if silent:
        seen = f"of {len(servers)} servers in bus.url, {'; '.join(silent)}"
        return warning("bus", seen, "start it: the run goes on without it, and fewer others may be away")
    return ok("bus", f"{', '.join(servers)} {'answers' if len(servers) == 1 else 'answer'}")
