"""The engine's images: from the call, or fetched from the bus by their hash."""

import pytest

from penstock.bus.connection import Bus
from penstock.bus.image_store import ImageStore
from penstock.errors import InvalidRequestError, MissingImageError
from penstock.v1 import common_pb2
from services.rollout.engine.image_source import ImageSource

BROUGHT = common_pb2.Image(data=b"GIF89a brought")


def stored(sha256: str) -> common_pb2.Image:
    """An image that a call names by hash."""
    return common_pb2.Image(stored=common_pb2.StoredImage(sha256=sha256, scope="run.0.0.a"))


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
