"""Watched values in NATS KV: the current contents of a bucket, held locally.

A watch continues if the server comes back without its store and the bucket is created again.

Invariant: a value ages only up to the last proof that its bucket works. While the bucket does not work (its server is
away, or its cluster elects a leader), nobody can renew the value. An outage is noticed if the bucket's leader was asked
in vain, took unusually long to answer, or was silent for the whole time to live. After such an outage, each value that
had not expired before has its whole time to live again.
"""

import asyncio
import copy
import math
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, NamedTuple

import structlog
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

from penstock.bus.cluster.majority import ALONE_S, BEAT_S, silence_s
from penstock.bus.failures import BUS_ERRORS, describe
from penstock.errors import SetupError
from penstock.runtime.process import end_task

log = structlog.get_logger()

_OPEN_TIMEOUT_S = 10.0
_MAX_SILENCE_S = 2.0
_OF_SILENCE = 1 / 3
"""Share of the time after which the leader is asked; an answer that takes longer is slow."""
_ABANDONED_S = 10.0
"""Seconds without a listener after which the server drops a watch."""
_KEPT_TTLS = 2
"""Times to live after which an expired value is forgotten."""


class _Seen(NamedTuple):
    """A value, its revision, and when it arrived, by the clock of `Watch._now`."""

    value: bytes
    revision: int
    at: float


class Watch:
    """The current values of a bucket; a value that was not renewed within `ttl_s` is dropped."""

    def __init__(self, bucket: KeyValue, *, keys: str = ">", ttl_s: float | None = None) -> None:
        """Use `watched`."""
        self._bucket = bucket
        self._keys = keys
        self._ttl_s = ttl_s
        self._values: dict[str, _Seen] = {}
        self._changed = asyncio.Event()
        self.num_changes = 0
        """Number of changes so far; a renewal with the same value is none. Pass it to `changed`, so that a change
        between two waits is not missed."""
        self._following: asyncio.Task[None] | None = None
        # A silent watch is reopened, because it may have died with the server. It is reopened well within the time to
        # live: otherwise a restart of the server would make all leases look expired.
        self._silence_s = min(_MAX_SILENCE_S, (ttl_s or math.inf) / 2)
        self._heard_at = -math.inf
        self._worked_at = time.monotonic()
        """When the bucket was last seen to work: its leader answered, or a new value arrived."""
        self._stalled_s = 0.0
        """Seconds for which values did not age."""
        self._was_away = False
        """Whether it is known that the bucket did not work at some time since then."""
        self._is_slow = False
        """Whether the leader took long for its last answer."""
        self._back_at = -math.inf
        """When the bucket last worked again after it had not."""

    @property
    def values(self) -> dict[str, bytes]:
        """Return the values by key, without expired ones."""
        oldest = self._oldest()
        return {key: seen.value for key, seen in self._values.items() if seen.at > oldest}

    async def changed(self, timeout_s: float, *, since: int | None = None) -> bool:
        """Wait up to `timeout_s` for the next change; return whether there was one. Several callers may wait at once.

        Raises the error that ended the watch, if one did: its values would never change again.

        Args:
            timeout_s: Seconds.
            since: Return at once if `num_changes` is more than this; -1: in any case. None: wait for a later change.
        """
        event, following = self._changed, self._following
        if following is not None and following.done() and not following.cancelled():
            following.result()
        if since is not None and since < self.num_changes:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return event.is_set()  # changed at the moment of the timeout
        return True

    async def _follow(self, ready: asyncio.Event) -> None:
        # The old watch may also be alive with nothing to report, so it is read until the new one is open, which takes
        # a slow server long.
        last, has_failed = AsyncExitStack(), False
        try:
            while True:
                try:
                    await self._ask_leader()
                    opened = AsyncExitStack()
                    watcher = await opened.enter_async_context(_opened(self._bucket, self._keys))
                    reading = asyncio.create_task(self._read(watcher, ready))
                    opened.push_async_callback(end_task, reading)
                    before, last, has_failed = last, opened, False
                    await before.aclose()
                    await self._until_silent(reading)
                except BUS_ERRORS as error:
                    # Once for all failures in a row: a watch that cannot be opened says nothing of the leases.
                    self._was_away |= not has_failed
                    has_failed = True
                    log.debug("watch.reopened", error=describe(error))
                    await asyncio.sleep(0.2)
        finally:
            await last.aclose()

    async def _ask_leader(self) -> None:
        """Return if the bucket works: its leader answers, and stores what is written.

        Raises:
            TimeoutError, nats.errors.Error: it does not work.
        """
        begun = time.monotonic()
        try:
            async with asyncio.timeout(_MAX_SILENCE_S):
                status = await self._bucket.status()
            if (alone_s := silence_s(status.stream_info.cluster)) >= ALONE_S:
                raise TimeoutError("the bucket has no leader that reaches a majority")
        except BUS_ERRORS:
            self._was_away = True
            raise
        # The question may have waited for an election. A leader that is always slow has not been away.
        was_slow, self._is_slow = self._is_slow, time.monotonic() - begun > self._silence_s * _OF_SILENCE
        self._was_away |= self._is_slow and not was_slow
        self._note_work(ago_s=max(0.0, alone_s - BEAT_S))

    async def _until_silent(self, reading: asyncio.Task[None]) -> None:
        """Return when the watch has been silent for long; raise the error that ended the reading."""
        self._heard_at = time.monotonic()
        while (rest_s := self._heard_at + self._silence_s - time.monotonic()) > 0:
            await asyncio.wait({reading}, timeout=rest_s)
            if reading.done():
                return await reading

    async def _read(self, watcher: KeyValue.KeyWatcher, ready: asyncio.Event) -> None:
        """Store the updates of the watch until it fails."""
        seen: set[str] = set()
        caught_up = False
        async for entry in watcher:  # its updates(timeout) may swallow a cancellation
            self._heard_at = time.monotonic()
            if entry is not None:
                seen.add(entry.key)
                self._store(entry)
                is_complete = entry.delta == 0
            else:
                is_complete = bool(seen) or not await _has_sent(watcher)
            if is_complete and not caught_up:
                # While the bucket did not work, values aged by the server's clock.
                if self._ttl_s is None or time.monotonic() - self._back_at >= self._ttl_s:
                    for gone in set(self._values) - seen:
                        self._values.pop(gone)
                        self._announce()
                caught_up = True
                ready.set()

    def _now(self) -> float:
        """Return the time by which values age: the last at which the bucket was seen to work, less what it stood still.

        What has passed since then may be the first moments of an outage, in which nobody could renew.
        """
        return self._worked_at - self._stalled_s

    def _oldest(self) -> float:
        """Return the time of `_now` at which or before which values arrived that have expired."""
        return -math.inf if self._ttl_s is None else self._now() - self._ttl_s

    def _note_work(self, *, ago_s: float = 0.0) -> None:
        """Note that it worked `ago_s` ago; if it did not before, unexpired values get their whole time to live."""
        silent_s = max(0.0, time.monotonic() - ago_s - self._worked_at)
        was_away = self._was_away or silent_s >= (self._ttl_s or math.inf)
        alive = self.values if was_away else {}  # before their clock moves
        self._stalled_s += max(0.0, silent_s - self._silence_s)
        self._worked_at += silent_s
        if was_away:
            self._was_away, self._back_at = False, self._worked_at
            self._values = {key: self._values[key]._replace(at=self._now()) for key in alive}

    def _store(self, entry: KeyValue.Entry) -> None:
        """Store an update, or remove the value that it deletes."""
        if entry.operation in ("DEL", "PURGE") or entry.value is None:
            if self._values.pop(entry.key, None) is not None:
                self._note_work()
                self._announce()
        elif (known := self._values.get(entry.key)) is None or known[:2] != (entry.value, entry.revision):
            # A value that was seen before keeps its age. The revision alone does not identify it: a recreated bucket
            # counts from 1 again.
            assert entry.revision is not None, "the server numbers what it stores"
            is_renewal = known is not None and known.value == entry.value and known.at > self._oldest()
            self._note_work()
            if known is None:
                self._forget_expired()
            self._values[entry.key] = _Seen(entry.value, entry.revision, self._now())
            if not is_renewal:
                self._announce()

    def _forget_expired(self) -> None:
        """Forget values that expired long ago, whose keys come back no more: an engine that starts again has a new one.

        Not at once: a value that is seen again shortly after it has expired must not count as new.
        """
        if self._ttl_s is None:
            return
        oldest = self._now() - _KEPT_TTLS * self._ttl_s
        self._values = {key: seen for key, seen in self._values.items() if seen.at > oldest}

    def _announce(self) -> None:
        self.num_changes += 1
        self._changed.set()
        self._changed = asyncio.Event()


async def _has_sent(watcher: KeyValue.KeyWatcher) -> bool:
    """Return whether the server has values for a new watcher, sent or not.

    nats-py calls a watcher complete that has received nothing when the server has nothing left to send. Under load, its
    question overtakes the values: taken at its word, it would make every replica look gone.
    """
    subscription: JetStreamContext.PushSubscription | None = watcher._sub
    assert subscription is not None, "the watcher is open"
    info = await subscription.consumer_info()
    return bool(info.num_pending or (info.delivered is not None and info.delivered.consumer_seq))


@asynccontextmanager
async def _opened(bucket: KeyValue, keys: str) -> AsyncIterator[KeyValue.KeyWatcher]:
    """Open a watcher of nats-py; at the end, remove its subscription and the subscription's tasks.

    nats-py leaves both behind if the watcher fails or is cancelled while it is being opened.
    """
    bucket, subscriptions = copy.copy(bucket), list[JetStreamContext.PushSubscription]()
    jetstream = bucket._js

    async def subscribe(*args: Any, **options: Any) -> JetStreamContext.PushSubscription:
        subscriptions.append(await jetstream.subscribe(*args, **options))
        return subscriptions[-1]

    bucket._js = copy.copy(jetstream)
    bucket._js.subscribe = subscribe  # type: ignore[method-assign]
    try:
        yield await bucket.watch(keys, inactive_threshold=_ABANDONED_S)
    finally:
        for subscription in subscriptions:
            try:
                with suppress(*BUS_ERRORS):
                    await subscription.unsubscribe()
            finally:
                state: Any = subscription._sub._jsi
                await end_task(state._hbtask)
                await end_task(state._fctask)


@asynccontextmanager
async def watched(bucket: KeyValue, *, keys: str = ">", ttl_s: float | None = None) -> AsyncIterator[Watch]:
    """Watch a bucket during the context; the values are complete on entry.

    Args:
        bucket: The bucket.
        keys: One key, or a NATS pattern. Matching keys are read again after every few seconds of silence, so watch a
            bucket with a long history by key.
        ttl_s: Seconds after which a value that was not renewed is dropped. None: values stay.

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
