"""A server of environments: plays episodes of any registered environment for workers elsewhere.

While it stops it takes no new episode; a worker begins it at another server, or here after the restart. Running
episodes may continue for the grace period.
"""

import asyncio
import contextlib
import importlib.metadata
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import structlog
from fastapi import FastAPI, Request, Response

from penstock.errors import ConfigError, EnvironmentFailedError, InvalidRequestError
from penstock.http.app import make_app
from penstock.http.body_parsing import parse_body
from penstock.http.server import HttpServer
from penstock.runtime.security import ENVIRONMENT_TOKEN, Security, read_secret
from penstock.telemetry import metrics
from penstock.telemetry.serving import serving_metrics
from services.rollout.worker.environments.config import EnvironmentServerConfig, EnvironmentServerSettings
from services.rollout.worker.environments.hosting import messages
from services.rollout.worker.environments.hosting.served_episodes import ServedEpisodes
from services.rollout.worker.environments.registry import EnvironmentRegistry
from services.rollout.worker.loop_watchdog import LoopWatchdog

log = structlog.get_logger()

MAX_EPISODES: int = EnvironmentServerConfig().max_episodes
MAX_IDLE_S = 3600.0
"""Longer than a turn may wait for a replica and be played, because an episode's clock is paused meanwhile."""
_DESCRIPTION = "Environments for Penstock's rollout workers. docs/rollouts/environments.md describes the messages."


@contextlib.asynccontextmanager
async def serving_environments(
    registry: EnvironmentRegistry,
    names: Sequence[str],
    *,
    security: Security,
    host: str = "127.0.0.1",
    port: int = 0,
    max_episodes: int = MAX_EPISODES,
    max_idle_s: float = MAX_IDLE_S,
    grace_s: float = 5.0,
) -> AsyncIterator[HttpServer]:
    """Serve the environments `names` of `registry`, which is started, during the context.

    Args:
        registry: Finds the environments.
        names: The served environments.
        security: Credentials that callers must show. `PENSTOCK_ENVIRONMENT_TOKEN`, if set, replaces its token.
        host: Address to listen on.
        port: Port to listen on; 0 takes any free one.
        max_episodes: Episodes at once; further ones are refused with 429, and their workers try again.
        max_idle_s: Seconds without a call after which an episode ends, because its worker has vanished.
        grace_s: Seconds that running episodes get at the end.

    Raises:
        ConfigError: a name is unknown.
        SetupError: the port is in use.
    """
    if unknown := sorted({*names} - {*registry.names}):
        raise ConfigError(
            f"environment_server.names has {', '.join(unknown)}, which is unknown; known: {', '.join(registry.names)}; "
            f'for one of yours add --worker.environments.{unknown[0]}="package.module:Class"'
        )
    episodes = ServedEpisodes(registry, frozenset(names), max_episodes=max_episodes, max_idle_s=max_idle_s)
    server = HttpServer(
        _make_app(episodes),
        host=host,
        port=port,
        key="environment_server.port",
        max_body_bytes=messages.MAX_MESSAGE_BYTES,
        security=replace(security, token=read_secret(ENVIRONMENT_TOKEN) or security.token),
    )
    await server.start()
    expiring = asyncio.create_task(episodes.expire())
    try:
        with metrics.exposed(episodes.read):
            yield server
    finally:
        ends_at = time.monotonic() + grace_s
        await episodes.drain(grace_s)
        expiring.cancel()
        await asyncio.gather(expiring, return_exceptions=True)
        await server.drain(max(0.0, ends_at - time.monotonic()))
        await episodes.close()


async def serve(settings: EnvironmentServerSettings, stop: asyncio.Event, *, security: Security) -> None:
    """Serve environments until `stop` is set, then drain.

    Raises:
        ConfigError: an environment is unknown, or cannot be loaded.
        SetupError: the port is in use.
    """
    config = settings.server
    async with (
        EnvironmentRegistry(settings.environments, security=security, max_processes=settings.max_processes) as registry,
        serving_environments(
            registry,
            config.names,
            host=settings.network.host,
            port=config.port,
            security=security,
            max_episodes=config.max_episodes,
            grace_s=settings.run.grace_s,
        ) as server,
        serving_metrics(settings.metrics, settings.run, settings.network, security),
    ):
        log.info("environments.served", names=sorted(config.names), address=server.url)
        with LoopWatchdog(registry.in_loop):
            await stop.wait()


def _make_app(episodes: ServedEpisodes) -> FastAPI:
    app = make_app(
        title="Penstock environments", description=_DESCRIPTION, version=importlib.metadata.version("penstock")
    )

    @app.post("/v1/episodes/{episode_id}")
    async def answer(episode_id: str, request: Request) -> Response:
        """Answer a request of an episode; its `kind` says which."""
        try:
            decoded = await parse_body(request, messages.decode_request)
        except EnvironmentFailedError as error:
            raise InvalidRequestError(str(error)) from None
        return Response(await episodes.answer(episode_id, decoded), media_type="application/json")

    @app.delete("/v1/episodes/{episode_id}")
    async def end(episode_id: str) -> dict[str, str]:
        """End an episode, even one that is gone."""
        await episodes.end(episode_id)
        return {"status": "ended"}

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Return 200 while the server takes episodes; 503 while it is stopping."""
        episodes.require_open()
        return {"status": "serving"}

    return app
