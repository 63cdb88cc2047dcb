"""Leases and watched values in NATS KV: who is alive, and what was published last.

A lease is a value that its holder renews; the server forgets it `ttl_s` after the last renewal, so a holder that was
killed vanishes by itself. A watch keeps the values of a bucket at hand, without asking for them. Both go on when the
server comes back without its store and somebody makes the bucket again.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import nats.errors
import structlog
from nats.js.kv import KeyValue

from penstock.bus.failures import BUS_ERRORS, describe
from penstock.errors import SetupError
from penstock.runtime.process import end_task

log = structlog.get_logger()

_OPEN_TIMEOUT_S = 10.0
_ABANDONED_S = 10.0
"""The server forgets a watch that nobody listens to after so long."""


class Lease:
    """A value of one's own in a bucket, alive as long as its holder."""

    def __init__(self, bucket: KeyValue, key: str, describe: Callable[[], bytes]) -> None:
        """Use `held`; `describe` gives the value at each renewal."""
        self._bucket = bucket
        self._key = key
        self._describe = describe

    async def renew(self) -> None:
        """Write the value now: after a change that others should see at once."""
        try:
            await self._bucket.put(self._key, self._describe())
        except BUS_ERRORS as error:
            log.warning("lease.renew_failed", key=self._key, error=describe(error))


@asynccontextmanager
async def held(bucket: KeyValue, key: str, describe: Callable[[], bytes], *, ttl_s: float) -> AsyncIterator[Lease]:
    """Hold a lease during the context: renewed every third of `ttl_s`, given back at the end."""
    lease = Lease(bucket, key, describe)

    async def keep() -> None:
        while True:
            await lease.renew()
            await asyncio.sleep(ttl_s / 3)

    task = asyncio.create_task(keep())
    try:
        yield lease
    finally:
        await end_task(task)
        with suppress(*BUS_ERRORS):
            await bucket.delete(key)


class _Seen(NamedTuple):
    """A value, its revision, and when (monotonic) that revision came."""

    value: bytes
    revision: int
    at: float


class Watch:
    """The values of a bucket as they are now; those not renewed within `ttl_s` are gone."""

    def __init__(self, bucket: KeyValue, *, keys: str = ">", ttl_s: float | None = None) -> None:
        """Use `watched`."""
        self._bucket = bucket
        self._keys = keys
        self._ttl_s = ttl_s
        self._values: dict[str, _Seen] = {}
        self._changed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    @property
    def values(self) -> dict[str, bytes]:
        """Key to value, of the living."""
        oldest = -math.inf if self._ttl_s is None else time.monotonic() - self._ttl_s
        return {key: seen.value for key, seen in self._values.items() if seen.at >= oldest}

    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next change, or for `timeout_s`; whether there was one. Any number may wait at once.

        Whatever ended the watch, other than its context, is raised here: its values would never change again.
        """
        event, following = self._changed, self._following
        if following is not None and following.done() and not following.cancelled():
            following.result()
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return event.is_set()  # both in one moment
        return True

    async def _follow(self, ready: asyncio.Event) -> None:
        # A watch that hears nothing is opened anew: it may have died with the server. Well within the time to live,
        # for else a restart of the server would make all leases look dead.
        silence_s = min(2.0, (self._ttl_s or math.inf) / 2)
        while True:
            try:
                watcher = await self._bucket.watch(self._keys, inactive_threshold=_ABANDONED_S)
                try:
                    await self._read(watcher, ready, silence_s)
                finally:
                    with suppress(*BUS_ERRORS):
                        await watcher.stop()  # type: ignore[no-untyped-call]
            except BUS_ERRORS as error:
                log.debug("watch.reopened", error=describe(error))
                await asyncio.sleep(0.2)

    async def _read(self, watcher: KeyValue.KeyWatcher, ready: asyncio.Event, silence_s: float) -> None:
        seen: set[str] = set()
        caught_up = False
        while True:
            try:
                entry = await watcher.updates(timeout=silence_s)  # type: ignore[no-untyped-call]
            except (nats.errors.TimeoutError, TimeoutError):
                return
            if entry is None:
                if not caught_up:
                    for gone in set(self._values) - seen:
                        self._values.pop(gone)
                        self._tell()
                caught_up = True
                ready.set()
                continue
            seen.add(entry.key)
            if entry.operation in ("DEL", "PURGE") or entry.value is None:
                if self._values.pop(entry.key, None) is not None:
                    self._tell()
            elif (known := self._values.get(entry.key)) is None or known[:2] != (entry.value, entry.revision):
                # A value that was seen before stays as old as it is. The revision alone does not tell: a bucket that
                # was made anew counts from 1 again.
                self._values[entry.key] = _Seen(entry.value, entry.revision, time.monotonic())
                self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@asynccontextmanager
async def watched(bucket: KeyValue, *, keys: str = ">", ttl_s: float | None = None) -> AsyncIterator[Watch]:
    """Watch a bucket during the context; on entry the values are those of now.

    Args:
        bucket: The bucket.
        keys: Which keys: one, or a pattern of NATS. They are read anew every few seconds of silence, so a bucket that
            also keeps a history is watched by key.
        ttl_s: A value that was not renewed for so long is gone. None: values stay.

    Raises:
        SetupError: the server does not answer.
    """
    watch = Watch(bucket, keys=keys, ttl_s=ttl_s)
    ready = asyncio.Event()
    task = watch._following = asyncio.create_task(watch._follow(ready))
    try:
        try:
            await asyncio.wait_for(ready.wait(), timeout=_OPEN_TIMEOUT_S)
        except TimeoutError:
            raise SetupError(
                f"NATS did not answer within {_OPEN_TIMEOUT_S:g} s; see that the server at bus.url runs"
            ) from None
        yield watch
    finally:
        await end_task(task)
