"""Stores images beside a run's streams: once per group, under their content hash, fetched when needed.

A *scope* is the group for which an image is stored (`penstock.records.GroupId.scope`). The images of a scope are
removed together, when the trainer has settled or passed over the group; any others expire after `MAX_AGE_S`.

Invariant: the image that `get` returns has the requested hash.
"""

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, TypeVar

import nats.js.errors
import structlog
from nats.js import api

from penstock.bus.connection import Bus
from penstock.bus.failures import BUS_ERRORS, Presence, describe
from penstock.bus.late_answers import LONGEST_S, awaited
from penstock.errors import InvalidRequestError, MissingImageError, UnavailableError
from penstock.runtime.backoff import Backoff

log = structlog.get_logger()

ResultT = TypeVar("ResultT")

MAX_AGE_S: Final = 7 * 24 * 3600.0
"""For groups that are never settled: those of an abandoned run, or of a worker that stores after the removal."""
CACHE_BYTES: Final = 256 * 2**20
"""Bytes of encoded images that a process keeps in memory."""

_FETCHES_AT_ONCE = 4
"""Enough to fill a link; all else that the server sends to this process waits behind them."""
_PUTS_AT_ONCE = 16
"""Images that `put_all` sends before the server has stored them: enough to hide the round trips. With more, each would
wait longer for its answer."""
_BACKOFF = Backoff(first_s=0.5, max_s=5.0)

_SCOPE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_HASH = re.compile(r"[0-9a-f]{64}")
_MAX_SCOPE_CHARS = 200


def hash_of(data: bytes) -> str:
    """Return the name of an image: SHA-256 of its file, in hex."""
    return hashlib.sha256(data).hexdigest()


class ImageStore:
    """The images of a run, with a cache bounded in bytes; any process of the run may write and read them."""

    def __init__(self, bus: Bus, *, cache_bytes: int = CACHE_BYTES) -> None:
        """Store images on `bus`, and cache recently used ones in memory."""
        self._bus = bus
        self._js = bus.client.jetstream(timeout=LONGEST_S)
        self._fetch_limit = asyncio.Semaphore(_FETCHES_AT_ONCE)
        self._put_limit = asyncio.Semaphore(_PUTS_AT_ONCE)
        self._cache = _ByteCache(cache_bytes)
        self._fetching: dict[str, asyncio.Task[bytes]] = {}
        self._is_away = False
        """Whether the last fetch got no answer."""

    async def ensure(self) -> None:
        """Create the stream if it does not exist.

        Raises:
            SetupError: it exists with other settings, or the server does not create it.
        """
        stream = self._bus.images
        await self._bus.ensure_stream(
            api.StreamConfig(
                name=stream.name,
                subjects=[f"{stream.subject}.>"],
                retention=stream.retention,
                storage=api.StorageType.FILE,
                max_msgs_per_subject=1,
                max_age=MAX_AGE_S,
                allow_direct=True,
            )
        )

    async def put(self, scope: str, data: bytes) -> str:
        """Store the image for `scope` and return its hash; safe to repeat.

        Raises:
            InvalidRequestError: it is larger than the server accepts.
            SetupError: the server no longer has the stream.
        """
        sha256 = hash_of(data)
        await self._bus.replace(self._bus.images, self._subject(scope, sha256), data)
        self._cache.add(sha256, data)
        return sha256

    async def put_all(self, scope: str, images: Sequence[bytes]) -> tuple[str, ...]:
        """Store images for `scope` at once, and return their hashes in the same order; safe to repeat.

        Raises:
            InvalidRequestError: as by `put`; no image is on its way any more.
            SetupError: as by `put`.
        """

        async def put(data: bytes) -> str:
            async with self._put_limit:
                return await self.put(scope, data)

        return tuple(await _all_of(put(data) for data in images))

    async def get(self, scope: str, sha256: str) -> bytes:
        """Return the image, from memory or from the bus; concurrent calls for the same image share one fetch.

        Raises:
            InvalidRequestError: scope or hash cannot belong to an image.
            MissingImageError: it is not stored for this scope.
            UnavailableError: the server does not answer.
        """
        if (data := self._cache.get(sha256)) is not None:
            return data
        subject = self._subject(scope, sha256)
        task = self._fetching.get(subject)
        if task is None:
            task = self._start(subject, lambda: self._fetch(subject, sha256))
        return await asyncio.shield(task)

    async def wait_for(self, scope: str, sha256: str) -> bytes:
        """Return the image as `get` does, retrying while the server is unreachable.

        Raises:
            InvalidRequestError: as by `get`.
            MissingImageError: as by `get`.
            SetupError: the server no longer has the stream.
        """
        presence, num_failures = self.presence(), 0
        while True:
            try:
                data = await self.get(scope, sha256)
            except UnavailableError as error:
                num_failures += 1
                level = log.debug if self._is_away else log.warning  # one warning per outage, not one per image
                level("image.fetch_retried", reason=str(error))
                self._is_away = True
                await presence.check()
                await asyncio.sleep(_BACKOFF.after(num_failures))
            else:
                self._is_away = False
                return data

    async def wait_for_all(self, scope: str, hashes: Sequence[str]) -> dict[str, bytes]:
        """Return images by their hashes, fetched at once as by `wait_for`.

        Raises:
            InvalidRequestError: as by `get`.
            MissingImageError: as by `get`.
            SetupError: the server no longer has the stream.
        """
        fetched = await _all_of(self.wait_for(scope, sha256) for sha256 in hashes)
        return dict(zip(hashes, fetched, strict=True))

    def presence(self) -> Presence:
        """Return a check that the server still has the stream; see `Presence`."""
        stream = self._bus.images
        return self._bus.presence(f"stream {stream.name}", lambda: self._bus.jetstream.stream_info(stream.name))

    async def remove(self, scope: str) -> None:
        """Remove all images of `scope`; a failure is only logged, because the images expire anyway."""
        stream = self._bus.images
        try:
            await self._bus.jetstream.purge_stream(stream.name, subject=f"{stream.subject}.{_checked(scope)}.*")
        except BUS_ERRORS as error:
            log.warning("images.remove_failed", scope=scope, error=describe(error))

    async def clear(self) -> None:
        """Remove all images of the run."""
        await self._bus.purge(self._bus.images)

    def _start(self, subject: str, fetch: Callable[[], Coroutine[Any, Any, bytes]]) -> asyncio.Task[bytes]:
        task = asyncio.create_task(fetch())
        self._fetching[subject] = task

        def forget(done: asyncio.Task[bytes]) -> None:
            del self._fetching[subject]
            if not done.cancelled():
                done.exception()  # all of its callers may be gone

        task.add_done_callback(forget)
        return task

    async def _fetch(self, subject: str, sha256: str) -> bytes:
        try:
            async with self._fetch_limit:
                asking = self._js.get_msg(self._bus.images.name, subject=subject, direct=True)
                message = await awaited(self._bus.client, asking)
        except nats.js.errors.NotFoundError:
            if await self._is_stored(subject):
                raise UnavailableError(f"image {sha256} has not reached the server that was asked") from None
            raise MissingImageError(f"image {sha256} is not stored under {subject}; store it again") from None
        except BUS_ERRORS as error:
            raise UnavailableError(f"image {sha256} cannot be fetched from NATS: {describe(error)}") from None
        data = message.data or b""
        if hash_of(data) != sha256:
            raise MissingImageError(f"what is stored under {subject} has another hash; store the image again")
        self._cache.add(sha256, data)
        return data

    async def _is_stored(self, subject: str) -> bool:
        """Ask the stream's leader; any of its servers answers a direct read, and may be behind.

        Raises:
            UnavailableError: the server does not answer.
        """
        if self._bus.config.replicas == 1:
            return False
        try:
            found = await self._bus.jetstream.stream_info(self._bus.images.name, subjects_filter=subject)
        except nats.js.errors.NotFoundError:
            return False
        except BUS_ERRORS as error:
            raise UnavailableError(f"images cannot be looked up in NATS: {describe(error)}") from None
        return bool(found.state.subjects)

    def _subject(self, scope: str, sha256: str) -> str:
        if not _HASH.fullmatch(sha256):
            raise InvalidRequestError(f"sha256 = {sha256[:80]!r} must be 64 hexadecimal digits in lower case")
        return f"{self._bus.images.subject}.{_checked(scope)}.{sha256}"


class _ByteCache:
    """Recently used images by hash, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: OrderedDict[str, bytes] = OrderedDict()

    def get(self, sha256: str) -> bytes | None:
        if sha256 not in self._images:
            return None
        self._images.move_to_end(sha256)
        return self._images[sha256]

    def add(self, sha256: str, data: bytes) -> None:
        if sha256 in self._images or len(data) > self._max_bytes:
            return
        self._images[sha256] = data
        self._num_bytes += len(data)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._images.popitem(last=False)[1])


async def _all_of(pending: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Await all of `pending`, also after an error, and return their results in order; raise the first error, if any."""
    results: list[ResultT] = []
    for result in await asyncio.gather(*pending, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


def _checked(scope: str) -> str:
    if len(scope) > _MAX_SCOPE_CHARS or not _SCOPE.fullmatch(scope):
        raise InvalidRequestError(
            f"scope = {scope[:80]!r} must be words of letters, digits, '_' and '-' with dots between them"
        )
    return scope
