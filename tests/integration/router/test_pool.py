"""What a router knows of the run's replicas."""

import asyncio

import pytest

from penstock.bus.buckets.replica_lease import write_replica
from penstock.bus.connection import Bus
from penstock.runtime.duty_cycle import DutyCycle
from penstock.v1 import common_pb2
from services.router import pool
from services.router.pool import open_pool
from tests.support.waiting import HANG_S, promptly, until


async def test_leases_that_change_while_it_rests_are_read_after_the_rest(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the next look without news: calls may wait for just these replicas."""
    resting, is_over = asyncio.Event(), asyncio.Event()

    class Resting(DutyCycle):
        async def rest(self) -> None:
            resting.set()
            await is_over.wait()

    monkeypatch.setattr(pool, "DutyCycle", Resting)
    monkeypatch.setattr(pool, "_REFRESH_S", 10 * HANG_S)
    bucket = await bus.bucket("replicas", ttl_s=bus.config.lease_ttl_s)

    async def announce(replica_id: str) -> None:
        replica = common_pb2.Replica(replica_id=replica_id, address="127.0.0.1:1")
        await bucket.put(replica_id, write_replica(replica))

    async with open_pool(bus) as opened:
        await announce("a")
        await promptly(resting.wait())
        await announce("b")
        await until(lambda: len(opened._replicas.values) == 2)
        assert opened.leases.keys() == {"a"}
        is_over.set()
        await until(lambda: opened.leases.keys() == {"a", "b"}, timeout_s=bus.config.lease_ttl_s / 2)
