"""The bus on three real nats-servers: what a killed one costs, and what a run needs of them.

`make test-nats-cluster` also freezes one and cuts one off, and trains on them.
"""

import asyncio
import contextlib
import itertools
import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from penstock.bus.buckets.leases import held
from penstock.bus.buckets.lock import TRAINER, locked
from penstock.bus.buckets.register import open_register
from penstock.bus.buckets.watch import watched
from penstock.bus.connection import Bus, connect
from penstock.bus.image_store import ImageStore
from penstock.bus.recordings import Recordings
from penstock.bus.work_queue.consumer import Delivery, consuming
from penstock.bus.work_queue.work_loop import work
from penstock.config import BusConfig
from penstock.errors import SetupError
from penstock.testing.local_cluster import ClusterServer, LocalCluster, local_cluster
from tests.support.bus.leaders import lead_all, metadata_leader_first, stored_streams
from tests.support.bus.stored_run import store_everything
from tests.support.waiting import HANG_S, until

TTL_S = 3.0
ELECTION_S = 11.0
"""Servers elect a leader after 4 to 9 s of silence."""
_NUM_GROUPS = 120

RESTARTS = pytest.mark.leaves_behind("a server that is started again lives as long as the cluster", "process")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One cluster for all tests that can share it; each leaves all of its servers running."""
    with local_cluster(tmp_path_factory.mktemp("cluster")) as local:
        yield local


@pytest.fixture
def config(cluster: LocalCluster) -> BusConfig:
    """All three servers, with each message and value on all of them."""
    return config_of(cluster)


def config_of(cluster: LocalCluster) -> BusConfig:
    return BusConfig(url=cluster.url, replicas=3, lease_ttl_s=TTL_S, ack_wait_s=6.0)


@pytest.fixture
async def run(config: BusConfig, run_name: str) -> AsyncIterator[Bus]:
    """A run whose streams, buckets and connection are gone afterwards."""
    async with connect(config, run=run_name) as bus:
        await bus.ensure_streams()
        yield bus
        await bus.delete_run()


async def test_all_that_a_run_stores_is_on_every_server(run: Bus, config: BusConfig, run_name: str) -> None:
    """Streams and buckets, and what compare-and-set decides is read from the leader only."""
    await store_everything(run, lease_ttl_s=TTL_S)
    stored = await stored_streams(run, run_name)
    assert len(stored) == 11
    for name in stored:
        info = await run.jetstream.stream_info(name)
        assert info.config.num_replicas == 3, name
        assert not (name.startswith("KV_") and info.config.allow_direct), name
    other = config.model_copy(update={"replicas": 1})
    async with connect(other, run=run_name) as unreplicated:
        remedy = r"set bus\.replicas to that.*or choose another run\.name"
        with pytest.raises(SetupError, match=rf"_PROMPTS exists with 3 replicas, and bus\.replicas = 1; {remedy}"):
            await unreplicated.ensure_streams()
        with pytest.raises(SetupError, match=r"_CALLS exists with 3 replicas, and bus\.replicas = 1"):
            await Recordings(unreplicated).ensure(max_age_s=60.0, max_bytes=2**20)
        with pytest.raises(SetupError, match=r"_policy exists with 3 replicas, and bus\.replicas = 1.*\[bus\] section"):
            await unreplicated.bucket("policy")


async def test_an_image_that_one_server_lacks_is_asked_for_again(run: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers answer direct reads, and may be behind: the leader knows whether it is stored."""
    images, readers = ImageStore(run), ImageStore(run)
    await images.ensure()
    sha256 = await images.put("run.1", b"picture")
    read, behind = readers._js.get_msg, iter([True])

    async def read_from_a_follower(*args: object, **options: object) -> object:
        return await read(*args, **{**options, "subject": "nowhere"} if next(behind, False) else options)  # type: ignore[arg-type]

    monkeypatch.setattr(readers._js, "get_msg", read_from_a_follower)
    assert await readers.wait_for("run.1", sha256) == b"picture"
    assert next(behind, None) is None


Lose = Callable[[ClusterServer], Awaitable[None]]
"""Takes a server away until another one has taken over, and brings it back."""


async def kill(server: ClusterServer) -> None:
    """With -9."""
    server.kill()
    await asyncio.sleep(ELECTION_S)
    server.start()


@pytest.mark.slow
@RESTARTS
@pytest.mark.usefixtures("run")
async def test_killing_the_leader_of_everything_loses_nothing(cluster: LocalCluster, run_name: str) -> None:
    """With worker and trainer connected to it."""
    await play_through(cluster, run_name, kill)


async def play_through(cluster: LocalCluster, name: str, lose: Lose) -> None:
    """Lose the leader of everything while groups are played: each group is stored once, the lock and each version stay
    their owner's, and no lease lapses of an engine that is connected to another server."""
    config = config_of(cluster)
    lapsed, played, num_versions = 0, Counter[str](), itertools.count(1)
    async with contextlib.AsyncExitStack() as stack:
        victim, other, third = metadata_leader_first(cluster)

        async def connected_to(server: ClusterServer) -> Bus:
            here = config.model_copy(update={"url": server.url})  # it tells its clients of the others
            return await stack.enter_async_context(connect(here, run=name))

        worker, trainer, engine, router = [await connected_to(each) for each in (victim, victim, other, third)]
        lease = held(await engine.bucket("replicas", ttl_s=TTL_S), "r", lambda: b"x", ttl_s=TTL_S)
        await stack.enter_async_context(lease)
        seen = watched(await router.bucket("replicas", ttl_s=TTL_S), ttl_s=TTL_S)
        watch = await stack.enter_async_context(seen)
        await until(lambda: "r" in watch.values)
        queue = await stack.enter_async_context(
            consuming(worker, worker.prompts, "workers", ack_wait_s=6.0, max_ack_pending=100)
        )
        groups = await stack.enter_async_context(
            consuming(trainer, trainer.groups, "trainer", ack_wait_s=6.0, max_ack_pending=1000)
        )
        lock = await stack.enter_async_context(locked(trainer, TRAINER, ttl_s=TTL_S))
        versions = await open_register(trainer, await trainer.bucket("policy"), "claimed")
        await lead_all(router, name, victim)
        stop = asyncio.Event()

        async def admit() -> None:
            for number in range(_NUM_GROUPS):
                await trainer.publish(trainer.prompts, b"prompt" * 100, message_id=f"p{number}")
                await asyncio.sleep(0.1)

        async def play(delivery: Delivery) -> None:
            await asyncio.sleep(0.05)
            await worker.publish(worker.groups, b"group" * 1000, message_id=f"g/{delivery.message_id}")

        async def train() -> None:
            while len(played) < _NUM_GROUPS:
                for delivery in await groups.fetch(10):
                    played[delivery.message_id] += 1
                    await lock.confirm()
                    await versions.write(f"{next(num_versions)} of mine".encode())
                    await delivery.ack()
            stop.set()

        async def look() -> None:
            nonlocal lapsed
            looked_at, late_at = time.monotonic(), -math.inf
            while not stop.is_set():
                before, looked_at = looked_at, time.monotonic()
                if looked_at - before > TTL_S / 3:
                    late_at = looked_at  # the holder, in this loop, was late with a renewal
                lapsed += "r" not in watch.values and looked_at - late_at > TTL_S
                await asyncio.sleep(0.05)

        async with asyncio.timeout(2 * HANG_S), asyncio.TaskGroup() as tasks:
            for job in (
                admit(),
                work(queue, play, stop=stop, concurrency=8, max_deliveries=20),
                train(),
                look(),
                lose(victim),
            ):
                tasks.create_task(job)
        stored = (await router.jetstream.stream_info(router.groups.name)).state.last_seq
        dead = (await router.jetstream.stream_info(router.dead.name)).state.messages
    assert stored == _NUM_GROUPS, "a group was stored twice"
    assert set(played) == {f"g/p{number}" for number in range(_NUM_GROUPS)}
    assert dead == 0
    assert lapsed == 0, "a living engine's lease lapsed"


@pytest.mark.slow
@RESTARTS
async def test_a_process_that_starts_while_there_is_no_leader_waits_for_one(
    cluster: LocalCluster, run: Bus, config: BusConfig, run_name: str
) -> None:
    """With one server, what cannot be set up is an error at once; here the others may be back within seconds. Nor is it
    an error of a process that has a connection already."""
    early = f"{run_name}-early"
    async with connect(config, run=early) as connected:
        away = [server for server in cluster.servers if server.url != f"nats://{connected.client.connected_url.netloc}"]
        for server in away:
            server.kill()

        async def start() -> None:
            async with connect(config, run=run_name) as bus:
                await bus.ensure_streams()
                async with consuming(bus, bus.prompts, "workers", ack_wait_s=6.0, max_ack_pending=10, fresh=True):
                    pass

        starting = asyncio.gather(start(), connected.ensure_streams())
        done, _ = await asyncio.wait({starting}, timeout=3.0)
        for server in away:
            server.start()
        assert not done
        await asyncio.wait_for(starting, HANG_S)
        await connected.delete_run()


async def test_more_replicas_than_servers_is_one_line(nats_url: str, run_name: str) -> None:
    """A single server."""
    async with connect(BusConfig(url=nats_url, replicas=3), run=run_name) as bus:
        for create in (bus.ensure_streams(), bus.bucket("policy"), ImageStore(bus).ensure()):
            with pytest.raises(SetupError) as caught:
                await create
            text = str(caught.value)
            assert re.search(r"cannot have bus\.replicas = 3 .*start 3 nats-servers .*or set bus\.replicas", text), text


@pytest.mark.slow
async def test_a_server_without_jetstream_is_named(tmp_path: Path, run_name: str) -> None:
    """It counts as a server of the cluster, and stores nothing."""
    with local_cluster(tmp_path, without_jetstream=1) as local:
        async with connect(BusConfig(url=local.url, replicas=3), run=run_name) as bus:
            with pytest.raises(SetupError) as caught:
                await bus.ensure_streams()
    text = str(caught.value)
    assert re.search(rf"{local.servers[2].url} runs without JetStream; add a jetstream block", text), text
