"""The router's server: how it starts, what it serves, how it stops.

It keeps nothing that another router would need: several serve one pool, and nothing is shared but NATS.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from penstock.bus.connection import Bus, connect
from penstock.errors import ConfigError, SetupError
from penstock.rpc.server import RpcServer, service_name
from penstock.runtime.hide_torch import torch_hidden
from penstock.runtime.security import Security
from penstock.v1 import router_pb2, router_pb2_grpc
from services.router.config import RouterConfig, RouterSettings
from services.router.forwarder import SERVICE_NAME, GenerateServicer, RequestForwarder
from services.router.frontends.router_service import RouterServicer
from services.router.pool import open_pool
from services.router.routes import Routes
from services.router.slot_pool import SlotPool

if TYPE_CHECKING:
    from services.router.frontends.openai.server import ChatBackend


@asynccontextmanager
async def routing(
    config: RouterConfig, bus: Bus, *, voice: "ChatBackend | None" = None, security: Security | None = None
) -> AsyncIterator[RpcServer]:
    """Run a router during the context, with the OpenAI-compatible face if it has a voice; it drains at the end."""
    security = security or Security.from_environment()
    async with open_pool(config, bus, security) as pool:
        places, routes = SlotPool(config, pool), Routes()
        player = RequestForwarder(config, places)
        server = RpcServer(host=config.host, port=config.port, security=security)
        server.add(GenerateServicer.register, GenerateServicer(config, player), SERVICE_NAME)
        router_name = service_name(router_pb2.DESCRIPTOR, "RouterService")
        servicer = RouterServicer(config, pool, places, routes)
        server.add(router_pb2_grpc.add_RouterServiceServicer_to_server, servicer, router_name)
        await server.start()
        try:
            async with AsyncExitStack() as faces:
                if voice is not None:
                    from services.router.frontends.openai.server import serving

                    await faces.enter_async_context(serving(config, bus, player, voice, security))
                yield server
        finally:
            await server.drain(config.grace_s)
            routes.close()


async def serve(settings: RouterSettings, stop: asyncio.Event, *, security: Security | None = None) -> None:
    """Run a router until `stop`.

    Meant for a process of its own: transformers is kept from importing torch.

    Raises:
        ConfigError: the OpenAI-compatible face is wanted, and no model or none with a tokenizer is given.
        SetupError: NATS is out of reach, a port is in use, or a package is missing.
    """
    voice = None if settings.router.http_port is None else await asyncio.to_thread(_load_voice, settings)
    async with (
        connect(settings.bus, run=settings.run.name, security=security) as bus,
        routing(settings.router, bus, voice=voice, security=security),
    ):
        with _rare_collections():
            await stop.wait()


def _load_voice(settings: RouterSettings) -> "ChatBackend":
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


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Have garbage collection look at fewer objects and less often: thousands of calls in flight are many objects, and
    each full collection is a pause for all of them."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
