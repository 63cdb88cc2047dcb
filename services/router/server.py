"""The router's server: start, services, stop.

It keeps no state that another router would need: several can serve one pool and share nothing but NATS.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from penstock.bus.connection import Bus, connect
from penstock.errors import ConfigError, SetupError
from penstock.rpc.server import RpcServer, service_name
from penstock.runtime.garbage import rare_collections
from penstock.runtime.imports import torch_hidden
from penstock.runtime.security import Security
from penstock.telemetry.metrics import exposed
from penstock.telemetry.serving import serving_metrics
from penstock.v1 import router_pb2, router_pb2_grpc
from services.router import tuning as constants
from services.router.config import RouterConfig, RouterSettings
from services.router.forwarder import RequestForwarder
from services.router.frontends.generate_service import SERVICE_NAME, GenerateServicer
from services.router.frontends.router_service import RouterServicer
from services.router.metrics import RouterMetrics
from services.router.pool import open_pool
from services.router.routes import Routes
from services.router.slots.slot_pool import SlotPool
from services.router.tuning import Tuning

if TYPE_CHECKING:
    from penstock.http.server import HttpServer
    from services.router.frontends.openai.server import ChatBackend


@asynccontextmanager
async def routing(
    config: RouterConfig,
    bus: Bus,
    *,
    host: str = "127.0.0.1",
    grace_s: float = 5.0,
    backend: "ChatBackend | None" = None,
    tuning: Tuning = constants.DEFAULT,
    security: Security | None = None,
) -> AsyncIterator[RpcServer]:
    """Run a router during the context; drain it at the end.

    Args:
        config: Its settings.
        bus: The run's bus.
        host: Address to listen on, for gRPC and HTTP.
        grace_s: Seconds that running calls get at the end.
        backend: The policy served by the OpenAI-compatible frontend; None: no such frontend.
        tuning: Constants.
        security: Credentials of callers and for calls to replicas; None: by the environment.
    """
    security = security or Security.from_environment()
    async with (
        open_pool(bus) as pool,
        contextlib.aclosing(SlotPool(config, pool, tuning=tuning, security=security)) as slots,
    ):
        routes, forwarder = Routes(), RequestForwarder(slots, tuning)
        server = RpcServer(host=host, port=config.port, key="router.port", security=security)
        server.add(GenerateServicer.register, GenerateServicer(forwarder, tuning), SERVICE_NAME)
        router_name = service_name(router_pb2.DESCRIPTOR, "RouterService")
        servicer = RouterServicer(pool, slots, routes, tuning=tuning, security=security)
        server.add(router_pb2_grpc.add_RouterServiceServicer_to_server, servicer, router_name)
        await server.start()
        servers: list[RpcServer | HttpServer] = [server]
        async with AsyncExitStack() as frontends:
            try:
                if backend is not None:
                    from services.router.frontends.openai.server import serving

                    frontend = serving(config, bus, forwarder, backend, security, host=host, tuning=tuning.openai)
                    servers.append(await frontends.enter_async_context(frontend))
                with exposed(RouterMetrics(pool, slots).read):
                    yield server
            finally:
                await asyncio.gather(*(each.drain(grace_s) for each in servers))
                routes.close()


async def serve(settings: RouterSettings, stop: asyncio.Event, *, security: Security) -> None:
    """Run a router until `stop`.

    Needs its own process, because it keeps transformers from importing torch.

    Raises:
        ConfigError: router.http_port is set, and there is no model, or its folder has no usable tokenizer.
        SetupError: NATS is unreachable, a port is in use, or a package is missing.
    """
    backend = None if settings.router.http_port is None else await asyncio.to_thread(_load_backend, settings)
    async with (
        connect(settings.bus, run=settings.run.name, security=security) as bus,
        routing(
            settings.router,
            bus,
            host=settings.network.host,
            grace_s=settings.run.grace_s,
            backend=backend,
            security=security,
        ),
        serving_metrics(settings.metrics, settings.run, settings.network, security),
    ):
        with rare_collections():
            await stop.wait()


def _load_backend(settings: RouterSettings) -> "ChatBackend":
    if settings.model is None:
        raise ConfigError(
            f"router.http_port = {settings.router.http_port} needs the model's tokenizer; give --model.path=FOLDER"
        )
    try:
        from services.router.frontends.openai.server import ChatBackend

        with torch_hidden():
            return ChatBackend.load(
                settings.router, run=settings.run.name, model_path=settings.model.path, sampling=settings.sampling
            )  # fmt: skip
    except ModuleNotFoundError as error:
        raise SetupError(
            f"router.http_port needs the Python package {error.name!r}, which is not installed; "
            "`pip install 'penstock[openai]'`"
        ) from None
