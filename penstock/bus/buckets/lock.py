"""A lock in a bucket that at most one process of a run holds.

The holder renews the lock with a compare-and-set. A claimant takes it over after watching it go unrenewed for `ttl_s`
on its own clock. No other clock counts, and nothing expires on the server. After an outage of the server the claimant
starts to watch again, because the holder could not renew either.

Invariant: once another process has taken the lock over, every `confirm` of the earlier holder raises. A holder that was
only silent, because it or the server was away, goes on if the lock was not taken meanwhile. So confirm the lock before
everything that two holders must not both do.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import structlog

from penstock.bus.buckets.lock_holder import RELEASED, read_lock_holder, this_process, write_lock_holder
from penstock.bus.buckets.register import Register, open_register
from penstock.bus.connection import Bus
from penstock.bus.failures import BUS_ERRORS
from penstock.errors import SetupError, SupersededError, UnavailableError
from penstock.runtime.process import beside

log = structlog.get_logger()

TRAINER = "trainer"
"""Name of the lock that the run's trainer holds."""
EVALUATION = "evaluation"
"""Name of the lock that `penstock eval` holds, whose run has no trainer."""
_BUCKET = "locks"
_POLL_S = 0.25
_PATIENCE_S = 2.0
"""A claimant waits this much longer than `ttl_s` for the holder to end."""
_RELEASE_TIMEOUT_S = 2.0


class Lock:
    """A lock that this process holds."""

    def __init__(self, register: Register, name: str, holder: bytes) -> None:
        """Use `locked`."""
        self._register = register
        self._name = name
        self._holder = holder
        self._renewing = asyncio.Lock()

    async def confirm(self) -> None:
        """Renew the lock; return once the server has confirmed that this process holds it.

        Waits while the server is unreachable.

        Raises:
            SupersededError: another process has taken it over.
            SetupError: the server no longer has the bucket.
        """
        async with self._renewing:
            try:
                await self._register.write(self._holder)
            except SupersededError:
                raise SupersededError(
                    f"another process has taken over as {self._name} of this run, because this one was silent for "
                    "too long; let that one go on, or stop it and start this one again"
                ) from None

    async def release(self) -> None:
        """Free the lock for the next claimant; does not fail if the lock is lost or the server is unreachable."""
        with suppress(SupersededError, SetupError, UnavailableError, TimeoutError, *BUS_ERRORS):
            async with asyncio.timeout(_RELEASE_TIMEOUT_S), self._renewing:
                await self._register.write(RELEASED)


@asynccontextmanager
async def locked(bus: Bus, name: str, *, ttl_s: float) -> AsyncIterator[Lock]:
    """Hold the run's lock `name` during the context; losing it cancels the context's body until it ends.

    Args:
        bus: The run's bus.
        name: What the holder is, for error messages: "trainer".
        ttl_s: A holder that does not renew for this long may be replaced. The lock is renewed every third of it.

    Raises:
        SetupError: another process holds it and renews it.
        SupersededError: another process took it over during the context.
    """
    lock = await claim(bus, name, ttl_s=ttl_s)

    async def keep() -> None:
        while True:
            await asyncio.sleep(ttl_s / 3)
            await lock.confirm()

    try:
        async with beside(keep()):
            yield lock
    finally:
        await lock.release()


async def claim(
    bus: Bus, name: str, *, ttl_s: float, clock: Callable[[], float] = time.monotonic, poll_s: float = _POLL_S
) -> Lock:
    """Take the lock without renewing it afterwards; use `locked`, which does.

    Raises:
        SetupError: another process holds it and renews it.
    """
    register = await open_register(bus, await bus.bucket(_BUCKET), name)
    holder = write_lock_holder(this_process())
    started = unchanged_since = clock()
    while True:
        if register.value == RELEASED or clock() - unchanged_since >= ttl_s:
            if register.value != RELEASED:
                log.warning("lock.taken_over", name=name, earlier_holder=_describe(register.value))
            with suppress(SupersededError):  # another claimant was faster
                await register.write(holder)
                return Lock(register, name, holder)
        elif clock() - started >= ttl_s + _PATIENCE_S:
            raise SetupError(
                f"another {name} of this run is running already ({_describe(register.value)}); stop it, or "
                "choose another run.name"
            )
        else:
            await asyncio.sleep(poll_s)
        seen = register.revision
        if not await register.read():  # the holder could not reach the server either
            started = unchanged_since = clock()
        elif register.revision != seen:
            unchanged_since = clock()


def _describe(value: bytes) -> str:
    holder = read_lock_holder(value)
    return "an unknown process" if holder is None else f"pid {holder.pid} on {holder.host}"
