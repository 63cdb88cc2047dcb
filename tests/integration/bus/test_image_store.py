"""Images travel once: stored under their hash, fetched once by whoever needs them, removed with their group."""

import asyncio
from typing import Any

import pytest

from penstock.bus.connection import Bus, Stream
from penstock.bus.image_store import ImageStore, hash_of
from penstock.errors import InvalidRequestError, MissingImageError
from tests.support.waiting import promptly, settled, until
from tests.support.worker.prompts import count

PICTURE = b"\x89PNG\r\n" + bytes(range(256)) * 4_000


@pytest.fixture
async def store(bus: Bus) -> ImageStore:
    """A process that stores images."""
    store = ImageStore(bus)
    await store.ensure()
    return store


async def test_an_image_is_fetched_by_its_hash_in_another_process(bus: Bus, store: ImageStore) -> None:
    """A megabyte arrives as it was; storing it again keeps one copy."""
    sha256 = await store.put("run.0.0.a", PICTURE)
    assert sha256 == hash_of(PICTURE) == await store.put("run.0.0.a", PICTURE)
    assert await ImageStore(bus).get("run.0.0.a", sha256) == PICTURE
    assert await count(bus, bus.images) == 1


async def test_calls_for_one_image_share_a_fetch_and_later_ones_need_none(bus: Bus, store: ImageStore) -> None:
    """Sixteen samples of a group make one request to NATS; once fetched, the image needs no server."""
    sha256 = await store.put("run.0.0.a", PICTURE)
    reader = ImageStore(bus)
    fetched = await asyncio.gather(*(reader.get("run.0.0.a", sha256) for _ in range(16)))
    assert all(data is fetched[0] for data in fetched)
    await store.clear()
    assert await reader.get("run.0.0.a", sha256) is fetched[0]


async def test_few_images_are_asked_for_at_once(bus: Bus, store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many groups are fetched: what else the server sends to this process waits behind them."""
    names = [await store.put("run.0.0.a", bytes([number]) * 1000) for number in range(24)]
    request, num_asked, most = bus.client.request, 0, 0

    async def count_asked(*args: Any, **options: Any) -> Any:
        nonlocal num_asked, most
        num_asked += 1
        most = max(most, num_asked)
        try:
            return await request(*args, **options)
        finally:
            num_asked -= 1

    monkeypatch.setattr(bus.client, "request", count_asked)
    reader = ImageStore(bus)
    await asyncio.gather(*(reader.get("run.0.0.a", name) for name in names))
    assert most == 4


async def test_images_are_stored_beside_each_other(
    bus: Bus, store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a round trip; but few at once, for each waits for its answer no longer than a deadline."""
    replace, num_sent, may_go = bus.replace, 0, asyncio.Event()

    async def hold(*image: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        await may_go.wait()
        await replace(*image)

    monkeypatch.setattr(bus, "replace", hold)
    images = [bytes([number]) * 100 for number in range(24)]
    storing = asyncio.create_task(store.put_all("run.0.0.a", images))
    await until(lambda: num_sent == 16)
    await settled()
    assert num_sent == 16
    may_go.set()
    assert await promptly(storing) == tuple(map(hash_of, images))
    assert await count(bus, bus.images) == 24


async def test_an_image_that_cannot_be_stored_leaves_no_other_on_its_way(
    bus: Bus, store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever then removes the scope removes all of them."""
    replace, held, may_go = bus.replace, asyncio.Event(), asyncio.Event()

    async def hold(stream: Stream, subject: str, image: bytes) -> None:
        if len(image) == 10:
            held.set()
            await may_go.wait()
        await replace(stream, subject, image)

    monkeypatch.setattr(bus, "replace", hold)
    monkeypatch.setattr(Bus, "max_payload_bytes", lambda *_: 50)
    storing = asyncio.create_task(store.put_all("run.0.0.a", [bytes(100), bytes(10)]))
    await promptly(held.wait())
    await settled()
    assert not storing.done()
    may_go.set()
    with pytest.raises(InvalidRequestError, match="100 bytes are more than"):
        await promptly(storing)
    assert await count(bus, bus.images) == 1
    await store.remove("run.0.0.a")
    assert await count(bus, bus.images) == 0


async def test_the_cache_is_bounded_in_bytes(bus: Bus, store: ImageStore) -> None:
    """The image used longest ago goes first; one that is larger than the cache is fetched each time."""
    small = [await store.put("run.0.0.a", bytes([number]) * 100) for number in range(3)]
    large = await store.put("run.0.0.a", PICTURE)
    reader = ImageStore(bus, cache_bytes=250)
    for sha256 in (small[0], small[1], small[0], small[2], large):
        await reader.get("run.0.0.a", sha256)
    await store.clear()
    assert [await reader.get("run.0.0.a", sha256) for sha256 in (small[0], small[2])] == [b"\0" * 100, b"\2" * 100]
    for gone in (small[1], large):
        with pytest.raises(MissingImageError, match=gone):
            await reader.get("run.0.0.a", gone)


async def test_images_go_with_their_group_and_come_back_when_stored_again(bus: Bus, store: ImageStore) -> None:
    """The same image of another group stays; a removal is no obstacle to storing anew."""
    for scope in ("run.0.0.a", "run.1.0.a"):
        sha256 = await store.put(scope, PICTURE)
    await store.remove("run.0.0.a")
    with pytest.raises(MissingImageError, match="store it again"):
        await ImageStore(bus).get("run.0.0.a", sha256)
    assert await ImageStore(bus).get("run.1.0.a", sha256) == PICTURE
    await store.put("run.0.0.a", PICTURE)
    assert await ImageStore(bus).get("run.0.0.a", sha256) == PICTURE


@pytest.mark.parametrize("scope", ["", ".", "a..b", "a.*", "a.>", "a b", "x" * 201, "a.", "\n"])
async def test_a_scope_cannot_reach_other_subjects(store: ImageStore, scope: str) -> None:
    """Scopes come with calls from outside."""
    with pytest.raises(InvalidRequestError, match="scope"):
        await store.get(scope, "0" * 64)


@pytest.mark.parametrize("sha256", ["", "0" * 63, "A" * 64, "*", "0" * 64 + "\n"])
async def test_a_hash_is_64_hexadecimal_digits(store: ImageStore, sha256: str) -> None:
    """Anything else is the caller's error."""
    with pytest.raises(InvalidRequestError, match="sha256"):
        await store.get("run.0.0.a", sha256)
