"""What a router knows of the run's replicas."""

import asyncio

import pytest

from penstock.bus.buckets.replica_lease import write_replica
from penstock.config import BusConfig
from penstock.runtime.duty_cycle import DutyCycle
from penstock.testing.local_bus import temporary_run
from penstock.v1 import common_pb2
from services.router import pool
from services.router.pool import open_pool
from tests.support.waiting import HANG_S, promptly, until


async def test_leases_that_change_while_it_rests_are_read_after_the_rest(
    bus_config: BusConfig, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the next look without news: calls may wait for just these replicas."""
    resting, is_over = asyncio.Event(), asyncio.Event()

    class Resting(DutyCycle):
        async def rest(self) -> None:
            resting.set()
            await is_over.wait()

    monkeypatch.setattr(pool, "DutyCycle", Resting)
    monkeypatch.setattr(pool, "_REFRESH_S", 10 * HANG_S)
    patient = bus_config.model_copy(update={"lease_ttl_s": 10 * HANG_S})
    async with temporary_run(patient, run_name) as bus, open_pool(bus) as opened:
        bucket = await bus.bucket("replicas", ttl_s=patient.lease_ttl_s)

        async def announce(replica_id: str) -> None:
            replica = common_pb2.Replica(replica_id=replica_id, address="127.0.0.1:1")
            await bucket.put(replica_id, write_replica(replica))

        await promptly(resting.wait())
        await announce("a")
        await until(lambda: len(opened._replicas.values) == 1)
        assert opened.leases == {}
        is_over.set()
        await until(lambda: opened.leases.keys() == {"a"})
