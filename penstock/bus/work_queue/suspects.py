"""Counts the deaths of processes per message, so that a message that kills its handlers is given up.

A process that is killed, runs out of memory or crashes reports nothing. So the count of a message is raised before it
is handled, and lowered again when its handling has ended, however it did. First deliveries are not counted: nearly all
messages have no other, and pay nothing.

A death counts for every message that was being handled, also for the innocent. So a message that was in hand at
`_DEATHS_TOGETHER` deaths is handled alone. The handling of an innocent one then ends, and only a killer gets to
`MAX_DEATHS`. Messages that wait for their turn alone are in hand, but no death counts for them. They wait in the order
in which they came.

A process that is frozen, or cut off from NATS for longer than the ack wait, counts as dead if another one gets its
message meanwhile, because that is all that the bus can see of it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final

import nats.js.errors
import structlog
from nats.js.kv import KeyValue

from penstock.bus.connection import Bus
from penstock.bus.failures import BUS_ERRORS, describe
from penstock.bus.work_queue.consumer import Delivery
from penstock.errors import PenstockError, PoisonError
from penstock.runtime.process import end_task

log = structlog.get_logger()

MAX_DEATHS: Final = 3
"""Counted deaths after which a message is given up. With the death at the first delivery a killer costs four, fewer
than end a run. Every further killer beside it costs one more."""
_DEATHS_TOGETHER = MAX_DEATHS - 1
"""Counted deaths after which a message is handled alone."""
_BUCKET = "deaths"
_TTL_S = 24 * 3600.0
"""Longer than a message is handled."""
_CLEAR_S = 5.0
"""As long as a cluster needs to elect a leader; a process that is asked to stop has a little longer."""


class Suspects:
    """The counts of a queue, and how many messages this process handles. Use `open_suspects`."""

    def __init__(self, bus: Bus, bucket: KeyValue, *, concurrency: int) -> None:
        """Count in `bucket`; this process handles at most `concurrency` messages at once."""
        self._bus = bus
        self._bucket = bucket
        self._concurrency = concurrency
        self._free = asyncio.Semaphore(concurrency)
        self._door = asyncio.Lock()

    @asynccontextmanager
    async def handling(self, delivery: Delivery) -> AsyncIterator[None]:
        """Wait until a message may be handled, beside others or alone, and count it as being handled meanwhile.

        Raises:
            PoisonError: it has killed its process too often.
            SetupError: the server no longer has the counts.
        """
        if delivery.num_delivered == 1:
            async with self._taken(1):
                yield
            return
        key = f"{delivery.queue}.{delivery.sequence}"
        num_deaths = await self._read(key)
        if num_deaths >= MAX_DEATHS:
            raise PoisonError(
                f"the process that handled it was killed, crashed or froze at delivery after delivery, {num_deaths} "
                "times after the first, and at last while it handled nothing else; its log may say why, or the "
                "kernel's if memory ran out"
            )
        is_alone = num_deaths >= _DEATHS_TOGETHER
        if is_alone:
            log.warning("suspect.handled_alone", message_id=delivery.message_id, num_deaths=num_deaths)
        async with self._taken(self._concurrency if is_alone else 1):
            try:
                await self._bus.put(self._bucket, key, b"%d" % (num_deaths + 1))
                yield
            except (KeyboardInterrupt, SystemExit, GeneratorExit):
                raise  # it ends the process
            except BaseException:
                await self._clear(key, num_deaths)
                raise
            await self._clear(key, num_deaths)

    @asynccontextmanager
    async def _taken(self, number: int) -> AsyncIterator[None]:
        async with AsyncExitStack() as taken:
            async with self._door:  # one that waits for all is overtaken by none
                for _ in range(number):
                    await taken.enter_async_context(self._free)
            yield

    async def _read(self, key: str) -> int:
        async def ask() -> int:
            try:
                return int((await self._bucket.get(key)).value or b"0")
            except nats.js.errors.KeyNotFoundError:
                return 0

        return await self._bus.retried(f"read of {key}", ask, self._bucket)

    async def _clear(self, key: str, num_deaths: int) -> None:
        """Lower the count again, also if the handler is cancelled meanwhile: a process that stops in order has not
        died."""
        # A task of its own: that of a handler which was cancelled would not ask again.
        lowering = asyncio.create_task(self._lower(key, num_deaths))
        try:
            await asyncio.shield(lowering)
        except asyncio.CancelledError:
            while not lowering.done():  # also if it is cancelled again
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({lowering})
            raise

    async def _lower(self, key: str, num_deaths: int) -> None:
        """Write the count. If the server does not answer, the message has one death too many."""
        writing = asyncio.create_task(self._bus.put(self._bucket, key, b"%d" % num_deaths))
        try:
            await asyncio.wait({writing}, timeout=_CLEAR_S)
            if not writing.done():
                raise TimeoutError(f"NATS did not answer for {_CLEAR_S:g} s")
            writing.result()
        except (PenstockError, *BUS_ERRORS) as error:
            log.warning("suspect.clear_failed", key=key, error=describe(error))
        finally:
            await end_task(writing)


async def open_suspects(bus: Bus, *, concurrency: int) -> Suspects:
    """Open the run's counts for a process that handles at most `concurrency` messages at once.

    Raises:
        SetupError: the server does not create their bucket.
    """
    return Suspects(bus, await bus.bucket(_BUCKET, ttl_s=_TTL_S), concurrency=concurrency)
