"""`make test-nats-cluster`: what a frozen or cut-off server of three costs. Not collected: each takes half a minute."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from penstock.bus.connection import connect
from penstock.testing.local_cluster import ClusterServer, local_cluster
from tests.integration.bus.cluster.test_cluster import ELECTION_S, config_of, play_through
from tests.support.bus.cut_routes import Routes

_UNTIL_LEFT_S = 16.0
"""A server notices after 10 s that it is alone; 3 s later its clients leave it."""
pytestmark = pytest.mark.filterwarnings(  # nats-py forgets a connection to a server that does not greet it
    "ignore:.*StreamWriter:pytest.PytestUnraisableExceptionWarning"
)


async def test_a_leader_that_freezes_loses_nothing(tmp_path: Path, run_name: str) -> None:
    """Its connections stay open."""

    async def freeze(server: ClusterServer) -> None:
        server.freeze()
        await asyncio.sleep(ELECTION_S)
        server.thaw()

    with local_cluster(tmp_path) as cluster:
        async with connect(config_of(cluster), run=run_name) as bus:
            await bus.ensure_streams()
            with capture_logs() as events:
                await play_through(cluster, run_name, freeze)
    assert_left(events)


async def test_a_leader_that_is_cut_off_loses_nothing(tmp_path: Path, run_name: str) -> None:
    """It goes on for ten seconds as if it led: it answers reads, and takes writes that never count."""
    async with Routes.open(3) as routes:
        with local_cluster(tmp_path, route_ports=routes.ports) as cluster:
            routes.lead(cluster)

            async def cut(server: ClusterServer) -> None:
                routes.cut(server)
                await asyncio.sleep(_UNTIL_LEFT_S)
                routes.mend()

            async with connect(config_of(cluster), run=run_name) as bus:
                await bus.ensure_streams()
                with capture_logs() as events:
                    await play_through(cluster, run_name, cut)
    assert_left(events)


def assert_left(events: Sequence[EventDict]) -> None:
    """Worker and trainer went on with another server, and did not wait for theirs to be back."""
    assert [event["event"] for event in events].count("bus.server_left") >= 2
