"""A run on a NATS server for the time of a test or a benchmark."""

import contextlib
from collections.abc import AsyncIterator

import nats.js.errors

from penstock.bus.connection import Bus, connect
from penstock.config import BusConfig

_BUCKETS = ("replicas", "policy", "leases", "locks")


@contextlib.asynccontextmanager
async def temporary_run(config: BusConfig, run: str) -> AsyncIterator[Bus]:
    """Connect to the run `run` and make its streams; they and its buckets are deleted at the end."""
    async with connect(config, run=run) as bus:
        await bus.ensure_streams()
        yield bus
        await bus.delete_run()
        for name in _BUCKETS:
            with contextlib.suppress(nats.js.errors.NotFoundError):
                await bus.jetstream.delete_key_value(f"{run}_{name}")
