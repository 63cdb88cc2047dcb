"""A temporary run on a NATS server, for tests and benchmarks."""

import contextlib
from collections.abc import AsyncIterator

import nats.js.errors

from penstock.bus.connection import Bus, connect
from penstock.config import BusConfig

_LEASES = "leases"
"""A bucket that only tests have."""


@contextlib.asynccontextmanager
async def temporary_run(config: BusConfig, run: str) -> AsyncIterator[Bus]:
    """Connect to the run `run` and create its streams; delete them and its buckets at the end."""
    async with connect(config, run=run) as bus:
        await bus.ensure_streams()
        yield bus
        await bus.delete_run()
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await bus.jetstream.delete_key_value(f"{run}_{_LEASES}")
