"""A key of a bucket that only writers that know its newest value may overwrite (compare-and-set).

Invariants: if two processes have read the same value, at most one replaces it; the other gets a `SupersededError`. A
write returns only if the server has acknowledged it during the call. What a read says is no proof, because a server
that was cut off from its cluster may still answer reads as it did before.
"""

import time

import nats.js.errors
from nats.js.kv import KeyValue

from penstock.bus.connection import Bus
from penstock.errors import SupersededError

_BELIEVED_AFTER_S = 30.0
"""Seconds after which a value that is older than the known one is taken for the newest: the bucket was made again. A
server of a cluster that is no longer the leader answers with older values for about ten seconds."""


class Register:
    """A key as this process last read or wrote it."""

    def __init__(self, bus: Bus, bucket: KeyValue, key: str) -> None:
        """Use `open_register`."""
        self._bus = bus
        self._bucket = bucket
        self._key = key
        self._revision = 0
        self._value = b""

    @property
    def value(self) -> bytes:
        """The value last read or written; empty if the key has none."""
        return self._value

    @property
    def revision(self) -> int:
        """The revision of that value; 0 if the key has none."""
        return self._revision

    async def read(self) -> bool:
        """Read the newest value, waiting for an unreachable server; return whether the first try was answered.

        Raises:
            SetupError: the server no longer has the bucket.
        """
        num_asked = 0

        async def ask() -> tuple[bytes, int]:
            nonlocal num_asked
            num_asked += 1
            return await self._newest()

        self._value, self._revision = await self._bus.retried(f"read of {self._key}", ask, self._bucket)
        return num_asked == 1

    async def write(self, value: bytes) -> None:
        """Replace the value that this process knows, retrying while the server is unreachable.

        A write whose answer is lost is recognised by its value, and written again.

        Args:
            value: A value that no other process writes, for example because it names the writer.

        Raises:
            SupersededError: another process has written the key since.
            SetupError: the server no longer has the bucket.
        """

        begun = time.monotonic()

        async def ask() -> int:
            try:
                return await self._bucket.update(self._key, value, last=self._revision)
            except nats.js.errors.KeyWrongLastSequenceError:
                found, revision = await self._newest()
                is_newer = revision > self._revision or time.monotonic() - begun > _BELIEVED_AFTER_S
                if not is_newer:
                    raise  # an earlier write is on its way through the cluster, or its leader has just changed
            if found != value:
                raise SupersededError(
                    f"another process has written {self._key!r}, which this process held; see that the run has one "
                    "trainer only"
                )
            self._revision = revision
            return await self._bucket.update(self._key, value, last=revision)

        self._revision = await self._bus.retried(f"write of {self._key}", ask, self._bucket)
        self._value = value

    async def _newest(self) -> tuple[bytes, int]:
        try:
            entry = await self._bucket.get(self._key)
        except nats.js.errors.KeyNotFoundError as error:
            return b"", 0 if error.entry is None else error.entry.revision
        return entry.value or b"", entry.revision or 0


async def open_register(bus: Bus, bucket: KeyValue, key: str) -> Register:
    """Read the key and return it; its bucket must have no time to live.

    Raises:
        SetupError: the server no longer has the bucket.
    """
    register = Register(bus, bucket, key)
    await register.read()
    return register
