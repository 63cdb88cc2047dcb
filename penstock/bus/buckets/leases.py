"""Leases in NATS KV, which show which processes are alive.

A lease is a value that its holder renews. The server drops it `ttl_s` after the last renewal, so the lease of a killed
process lapses on its own; `penstock.bus.buckets.watch` says when it has lapsed for those who watch it. For something
that only one process may hold at a time, use `penstock.bus.buckets.lock`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import structlog
from nats.js.kv import KeyValue

from penstock.bus.failures import BUS_ERRORS, describe
from penstock.runtime.process import end_task

log = structlog.get_logger()

_PASSING_S = 0.2
"""Seconds for which a passing state stays unwritten. All who watch the bucket read every write."""


class Lease:
    """A value of this process in a bucket, which lapses unless renewed."""

    def __init__(self, bucket: KeyValue, key: str, describe: Callable[[], bytes], *, timeout_s: float) -> None:
        """Use `held`; `describe` returns the value at each renewal, which is given up after `timeout_s`."""
        self._bucket = bucket
        self._key = key
        self._describe = describe
        self._timeout_s = timeout_s

    async def renew(self) -> None:
        """Write the value now, so that others see a change at once."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._bucket.put(self._key, self._describe())
        except BUS_ERRORS as error:
            log.warning("lease.renew_failed", key=self._key, error=describe(error))

    async def renew_on_change(self, changed: asyncio.Event, *, is_passing: Callable[[], bool] = lambda: False) -> None:
        """Write the value whenever `changed` is set, until cancelled.

        A state for which `is_passing()` holds, such as the pause of a push, is written only if no other follows within
        `_PASSING_S`.
        """
        while True:
            await changed.wait()
            if is_passing():
                changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PASSING_S):
                        await changed.wait()
            changed.clear()
            await self.renew()


@asynccontextmanager
async def held(bucket: KeyValue, key: str, describe: Callable[[], bytes], *, ttl_s: float) -> AsyncIterator[Lease]:
    """Hold a lease during the context: renew it every third of `ttl_s`, and delete it at the end.

    The time of a slow renewal is subtracted from the next pause: otherwise a renewal that takes two thirds of `ttl_s`
    would let the lease lapse. After a third of `ttl_s` without an answer the next renewal is sent: a server that has
    died does not answer, and another one may have taken over.
    """
    lease = Lease(bucket, key, describe, timeout_s=ttl_s / 3)

    async def keep() -> None:
        while True:
            begun = time.monotonic()
            await lease.renew()
            await asyncio.sleep(begun + ttl_s / 3 - time.monotonic())

    task = asyncio.create_task(keep())
    try:
        yield lease
    finally:
        await end_task(task)
        with suppress(*BUS_ERRORS):
            await bucket.delete(key)
