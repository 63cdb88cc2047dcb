"""What every client of a service has: a channel, a deadline for each call, and retries of what may succeed later."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

import structlog

from penstock.errors import NotReadyError, OverloadedError, PenstockError, UnavailableError
from penstock.rpc.channel import connect
from penstock.runtime.security import Security

log = structlog.get_logger()

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_MIN_ATTEMPT_S = 0.05

ResultT = TypeVar("ResultT")


class Client:
    """A channel to one server; use it as a context manager, or `close` it."""

    def __init__(self, address: str, *, security: Security | None = None) -> None:
        """Prepare a channel to `address` (host:port); it connects at the first call and reconnects by itself.

        Args:
            address: The server.
            security: Tokens and TLS; None: the tokens of the environment (PENSTOCK_TOKEN), in plain text.
        """
        self.address = address
        self._channel = connect(address, security)
        self._failing = False

    async def close(self) -> None:
        """Close the channel; calls that run are cancelled."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        """The client itself."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close the channel."""
        await self.close()

    async def _retried(
        self, attempt: Callable[[int, float], Awaitable[ResultT]], *, timeout_s: float, retry_until: float | None
    ) -> ResultT:
        """Call `attempt(number, timeout_s)` until it succeeds, fails for good, or `retry_until` (monotonic) comes.

        What may succeed later is tried again: UnavailableError, OverloadedError and NotReadyError. Waits grow from
        0.1 to 2 seconds, each drawn between half of it and all of it: callers that failed together come back apart.
        """
        number, backoff_s = 0, _FIRST_BACKOFF_S
        while True:
            remaining_s = timeout_s if retry_until is None else min(timeout_s, retry_until - time.monotonic())
            try:
                result = await attempt(number, max(_MIN_ATTEMPT_S, remaining_s))
            except (UnavailableError, OverloadedError, NotReadyError) as error:
                wait_s = backoff_s * random.uniform(0.5, 1.0)
                if retry_until is None or time.monotonic() + wait_s >= retry_until:
                    raise
                self._tell_failing(error)
                await asyncio.sleep(wait_s)
                number, backoff_s = number + 1, min(_MAX_BACKOFF_S, 2 * backoff_s)
            else:
                self._failing = False
                return result

    def _tell_failing(self, error: PenstockError) -> None:
        """One warning when a server stops answering, not one for each of a thousand calls."""
        level = log.debug if self._failing else log.warning
        level("call.retried", address=self.address, reason=str(error))
        self._failing = True
