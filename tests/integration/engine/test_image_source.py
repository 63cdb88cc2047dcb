"""The engine's images: from the call, or fetched from the bus by their hash."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.bus.connection import Bus
from penstock.bus.image_store import ImageStore
from penstock.clients.turn import MAX_ATTEMPTS
from penstock.errors import InvalidRequestError, MissingImageError, UnavailableError
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.v1 import common_pb2, generate_pb2
from services.rollout.engine.image_source import ImageSource
from tests.support.router.routers import ids, router
from tests.support.waiting import until

BROUGHT = common_pb2.Image(data=b"GIF89a brought")


def stored(sha256: str) -> common_pb2.Image:
    """An image that a call names by hash."""
    return common_pb2.Image(stored=common_pb2.StoredImage(sha256=sha256, scope="run.0.0.a"))


class StoreAway(ImageStore):
    """A store that does not answer until `is_back`."""

    is_back = False

    async def get(self, scope: str, sha256: str) -> bytes:
        if not self.is_back:
            raise UnavailableError("the image cannot be fetched from NATS: timeout")
        return await super().get(scope, sha256)


class SeeingEngine(SimulatedEngine):
    """Fetches a call's images before it answers."""

    images = ImageSource()

    async def GenerateStream(  # noqa: N802 - gRPC's name
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        self.num_calls += 1
        await self.images.files(request.images)
        async for chunk in super().GenerateStream(request, context):
            yield chunk


async def test_a_turn_waits_for_a_store_that_is_away(steady_bus: Bus) -> None:
    """However often its only replica rejects it meanwhile: that is no failure of the replica, nor of the turn."""
    store = StoreAway(steady_bus)
    await store.ensure()
    sha256 = await store.put("run.0.0.a", b"\x89PNG stored")
    engine = SeeingEngine(steady_bus, replica_id="r0")
    engine.images.attach(store)
    async with engine.running(), router(steady_bus, wait_for_replica_s=30.0) as caller:
        await caller.until_routable(1)
        pending = asyncio.ensure_future(caller.generate(timeout_s=30.0, images=[stored(sha256)]))
        await until(lambda: pending.done() or engine.num_calls > MAX_ATTEMPTS)
        assert not pending.done()
        store.is_back = True
        assert list((await pending).output_ids) == ids(4)


async def test_stored_and_brought_images_come_in_the_order_of_the_call(bus: Bus) -> None:
    """A call may mix them."""
    store = ImageStore(bus)
    await store.ensure()
    sha256 = await store.put("run.0.0.a", b"\x89PNG stored")
    source = ImageSource()
    source.attach(ImageStore(bus))
    assert await source.files([BROUGHT, stored(sha256), BROUGHT]) == [
        b"GIF89a brought",
        b"\x89PNG stored",
        b"GIF89a brought",
    ]
    with pytest.raises(MissingImageError, match="store it again"):
        await source.files([stored("0" * 64)])


async def test_an_engine_without_a_bus_takes_bytes_only() -> None:
    """And says so; an image that is neither is the caller's error too."""
    assert await ImageSource().files([BROUGHT]) == [b"GIF89a brought"]
    with pytest.raises(InvalidRequestError, match=r"images\[1\] is named by its hash"):
        await ImageSource().files([BROUGHT, stored("0" * 64)])
    with pytest.raises(InvalidRequestError, match=r"images\[0\] has neither"):
        await ImageSource().files([common_pb2.Image()])
