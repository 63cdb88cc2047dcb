"""The router's server: how it starts, what it serves, how it stops.

It keeps nothing that another router would need: several serve one pool, and nothing is shared but NATS.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from penstock.bus.connection import Bus, connect
from penstock.rpc.server import RpcServer, service_name
from penstock.v1 import router_pb2, router_pb2_grpc
from services.router.config import RouterConfig
from services.router.places import Places
from services.router.pool import open_pool
from services.router.proxy import SERVICE_NAME, GenerateServicer
from services.router.router_service import RouterServicer
from services.router.routes import Routes

if TYPE_CHECKING:
    from services.recipe import ServiceRecipe


@asynccontextmanager
async def routing(config: RouterConfig, bus: Bus) -> AsyncIterator[RpcServer]:
    """Run a router during the context; it drains at the end."""
    async with open_pool(config, bus) as pool:
        places, routes = Places(config, pool), Routes()
        server = RpcServer(host=config.host, port=config.port)
        server.add(GenerateServicer.register, GenerateServicer(config, places), SERVICE_NAME)
        router_name = service_name(router_pb2.DESCRIPTOR, "RouterService")
        servicer = RouterServicer(config, pool, places, routes)
        server.add(router_pb2_grpc.add_RouterServiceServicer_to_server, servicer, router_name)
        await server.start()
        try:
            yield server
        finally:
            await server.drain(config.grace_s)
            routes.close()


async def serve(recipe: "ServiceRecipe", stop: asyncio.Event) -> None:
    """Run the router of `recipe` until `stop`."""
    async with connect(recipe.bus, run=recipe.run.name) as bus, routing(recipe.router, bus):
        with _rare_collections():
            await stop.wait()


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
