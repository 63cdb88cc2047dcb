"""`make test-nats-cluster`: what a frozen or cut-off server of three costs. Not collected: each takes half a minute."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from penstock.bus.buckets.leases import held
from penstock.bus.buckets.watch import watched
from penstock.bus.connection import Bus, connect
from penstock.testing.local_cluster import ClusterServer, local_cluster
from tests.integration.bus.cluster.test_cluster import ELECTION_S, config_of, play_through
from tests.support.bus.cut_routes import Routes
from tests.support.bus.leaders import lead_all, metadata_leader_first
from tests.support.waiting import until

_UNTIL_NOTICED_S = 10.0
"""A leader that is cut off goes on at least as long as if it led."""
pytestmark = pytest.mark.filterwarnings(  # nats-py forgets a connection to a server that does not greet it
    "ignore:.*StreamWriter:pytest.PytestUnraisableExceptionWarning"
)


async def test_a_leader_that_freezes_loses_nothing(tmp_path: Path, run_name: str) -> None:
    """Its connections stay open."""
    num_left = 0

    async def freeze(server: ClusterServer) -> None:
        nonlocal num_left
        server.freeze()
        await asyncio.sleep(ELECTION_S)
        num_left = count_left(events, server)
        server.thaw()

    with local_cluster(tmp_path) as cluster:
        async with connect(config_of(cluster), run=run_name) as bus:
            await bus.ensure_streams()
            with capture_logs() as events:
                await play_through(cluster, run_name, freeze)
    assert num_left >= 2


async def test_a_leader_that_is_cut_off_loses_nothing(tmp_path: Path, run_name: str) -> None:
    """It goes on for 10 to 20 s as if it led: it answers reads, and takes writes that never count. Clients leave it
    before it notices.
    """
    num_left = 0
    async with Routes.open(3) as routes:
        with local_cluster(tmp_path, route_ports=routes.ports) as cluster:
            routes.lead(cluster)

            async def cut(server: ClusterServer) -> None:
                nonlocal num_left
                routes.cut(server)
                await asyncio.sleep(_UNTIL_NOTICED_S)
                num_left = count_left(events, server)
                await asyncio.sleep(ELECTION_S - _UNTIL_NOTICED_S)
                routes.mend()

            async with connect(config_of(cluster), run=run_name) as bus:
                await bus.ensure_streams()
                with capture_logs() as events:
                    await play_through(cluster, run_name, cut)
    assert num_left >= 2


async def test_what_nobody_can_renew_does_not_lapse_for_a_client_of_a_leader_that_is_cut_off(
    tmp_path: Path, run_name: str
) -> None:
    """The leader of the bucket answers as if leases could be renewed, and a router there keeps its engines."""
    ttl_s = 6.0
    async with contextlib.AsyncExitStack() as stack:
        routes = await stack.enter_async_context(Routes.open(3))
        cluster = stack.enter_context(local_cluster(tmp_path, route_ports=routes.ports))
        routes.lead(cluster)

        async def connected_to(server: ClusterServer) -> Bus:
            config = config_of(cluster).model_copy(update={"url": server.url, "lease_ttl_s": ttl_s})
            return await stack.enter_async_context(connect(config, run=run_name))

        await (await connected_to(cluster.servers[0])).ensure_streams()
        victim, other, _ = metadata_leader_first(cluster)
        engine, router = await connected_to(other), await connected_to(victim)
        bucket = await engine.bucket("replicas", ttl_s=ttl_s)
        await stack.enter_async_context(held(bucket, "r", lambda: b"x", ttl_s=ttl_s))
        watch = await stack.enter_async_context(watched(await router.bucket("replicas", ttl_s=ttl_s), ttl_s=ttl_s))
        await until(lambda: "r" in watch.values)
        await lead_all(engine, run_name, victim)
        routes.cut(victim)
        with pytest.raises(TimeoutError):  # there was no moment without it
            await until(lambda: "r" not in watch.values, ELECTION_S + ttl_s)


def count_left(events: Sequence[EventDict], server: ClusterServer) -> int:
    """How often clients left this server, to which worker and trainer are connected, instead of waiting for it."""
    return [(event["event"], event.get("url")) for event in events].count(
        ("bus.server_left", server.url.removeprefix("nats://"))
    )
