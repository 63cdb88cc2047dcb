"""Which server of a cluster leads a run's streams, and how a test moves them all to one."""

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable

import nats.errors
import nats.js.errors

from penstock.bus.connection import BUCKETS, Bus
from penstock.bus.failures import BUS_ERRORS
from penstock.testing.local_cluster import ClusterServer, LocalCluster
from tests.support.waiting import HANG_S

_BECAME_LEADER = re.compile(r"^\[\d+\] (\S+ \S+) .*Self is new JetStream cluster metadata leader", re.MULTILINE)


async def stored_streams(bus: Bus, run: str) -> list[str]:
    """The streams of the run that are there, those of its buckets among them."""
    names = [*(stream.name for stream in bus.streams), *(f"KV_{run}_{bucket}" for bucket in BUCKETS)]
    found = []
    for name in names:
        with contextlib.suppress(nats.js.errors.NotFoundError):
            found.append((await bus.jetstream.stream_info(name)).config.name or "")
    return found


async def leader_of(bus: Bus, stream: str) -> str:
    """Name of the server that leads the stream; empty while there is none."""
    try:
        cluster = (await bus.jetstream.stream_info(stream)).cluster
    except BUS_ERRORS:
        return ""
    return "" if cluster is None else cluster.leader or ""


def metadata_leader_first(cluster: LocalCluster) -> list[ClusterServer]:
    """The servers, first the one that leads JetStream itself: the last that became it, by the logs."""

    def became_leader(server: ClusterServer) -> str:
        return max(_BECAME_LEADER.findall(server.log.read_text(errors="replace")), default="")

    first = max(cluster.servers, key=became_leader)
    assert became_leader(first), "JetStream has no leader"
    return [first, *(server for server in cluster.servers if server is not first)]


async def lead_all(bus: Bus, run: str, server: ClusterServer) -> None:
    """Make `server` the leader of every stream and consumer of the run."""
    async with asyncio.timeout(HANG_S):
        for stream in await stored_streams(bus, run):
            await _lead(bus, server, f"STREAM.LEADER.STEPDOWN.{stream}", lambda stream=stream: leader_of(bus, stream))
        for stream in await stored_streams(bus, run):
            for consumer in await bus.jetstream.consumers_info(stream):
                if not consumer.config.durable_name:
                    continue

                async def leader(stream: str = stream, name: str = consumer.name) -> str:
                    try:
                        cluster = (await bus.jetstream.consumer_info(stream, name)).cluster
                    except BUS_ERRORS:
                        return ""
                    return "" if cluster is None else cluster.leader or ""

                await _lead(bus, server, f"CONSUMER.LEADER.STEPDOWN.{stream}.{consumer.name}", leader)


async def _lead(bus: Bus, server: ClusterServer, subject: str, leader: Callable[[], Awaitable[str]]) -> None:
    request = json.dumps({"placement": {"preferred": server.name}}).encode()
    while (now := await leader()) != server.name:
        if now:
            with contextlib.suppress(nats.errors.Error):
                await bus.client.request(f"$JS.API.{subject}", request, timeout=2.0)
        await asyncio.sleep(0.1)
