"""Answers the hosts that ask: POST /v1/host, with the token and TLS of every other port.

A host that has asked says when it has tried this host's ports, which stay open until then.
"""

import asyncio
import secrets
from collections.abc import Callable
from importlib.metadata import version

from penstock.http.app import make_app
from penstock.http.server import HttpServer
from penstock.runtime.security import Security, is_loopback
from services.doctor.hosts.facts import HostFacts, Question, look
from services.doctor.hosts.ports import greeting, server_ports
from services.recipe import Recipe

PATIENCE_S = 120.0
"""Seconds for the hosts that are expected to ask, or for the one that is asked to answer: each may have to import its
packages from a slow disk."""


async def answer_hosts(
    recipe: Recipe, security: Security, *, port: int, num_peers: int, stop: asyncio.Event, write: Callable[[str], None]
) -> list[str]:
    """Answer until `num_peers` hosts have asked, or until `stop`; return the name of each.

    Args:
        recipe: Has the address to listen on, and what is looked at.
        security: The token and TLS that askers need.
        port: Port to listen on; 0 takes any free one.
        num_peers: Hosts that are expected within PATIENCE_S; 0: any number, without a limit.
        stop: Ends the wait.
        write: Gets a line when it listens, and for each host.

    Raises:
        ConfigError: this host cannot listen on one of the recipe's ports.
        SetupError: the port is in use.
    """
    asked: dict[str, str] = {}
    ended: set[str] = set()
    ports = await asyncio.to_thread(server_ports, recipe)
    app = make_app(title="Penstock doctor", description="Facts about this host.", version=version("penstock"))

    own = {key: number for key, number in ports.items() if not port or number != port}
    with greeting(recipe.network.host, own, secrets.token_hex(16)) as open_ports:

        @app.post("/v1/host")
        async def host(question: Question) -> HostFacts:
            facts = await asyncio.to_thread(look, recipe, question, open_ports)
            if question.marker not in asked:
                asked[question.marker] = question.advertised
                write(f"{question.advertised} has asked")
            return facts

        @app.post("/v1/host/{marker}/end")
        async def end(marker: str) -> None:
            if marker in asked:
                ended.add(marker)
            if num_peers and len(ended) >= num_peers:
                stop.set()

        server = HttpServer(app, host=recipe.network.host, port=port, key="--serve", security=security)
        chosen = await server.start()
        write(f"answering `penstock doctor --with {recipe.network.advertised}:{chosen}` on other hosts")
        if is_loopback(recipe.network.host):
            write(f"only on this host: it listens on {recipe.network.host}; give --network.host=0.0.0.0 for others")
        try:
            async with asyncio.timeout(PATIENCE_S if num_peers else None):
                await stop.wait()
        except TimeoutError:
            pass
        finally:
            await server.drain(5.0)
    return list(asked.values())
