"""Base class of service clients: a channel, a deadline for each call, and retries of calls that may succeed later."""

import time
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

import structlog
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from penstock.errors import DeadlineError, NotReadyError, OverloadedError, UnavailableError
from penstock.rpc.channel import connect
from penstock.runtime.security import Security

log = structlog.get_logger()

_BACKOFF = wait_random_exponential(multiplier=0.1, max=2.0)
"""Random waits below a bound that doubles from 0.1 to 2 s, so that callers that failed together retry apart."""
_MIN_ATTEMPT_S = 0.05

ResultT = TypeVar("ResultT")


class Client:
    """A channel to one server; use it as a context manager, or `close` it."""

    _repeats_late_calls = False
    """Whether `_retried` also repeats calls that exceeded their deadline: of a server where a call changes nothing."""

    def __init__(self, address: str, *, security: Security | None = None, spread: bool = False) -> None:
        """Prepare a channel to `address` (host:port); it connects at the first call and reconnects automatically.

        Args:
            address: The server.
            security: Tokens and TLS; None: the tokens of the environment (PENSTOCK_TOKEN), in plain text.
            spread: Send calls in turn to all addresses that the name has.
        """
        self.address = address
        self._channel = connect(address, security, spread=spread)
        self._retries = _RetryLog(address)

    async def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        """Return the client itself."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close the channel."""
        await self.close()

    async def _retried(
        self, attempt: Callable[[int, float], Awaitable[ResultT]], *, timeout_s: float, retry_until: float | None
    ) -> ResultT:
        """Call `attempt(number, timeout_s)` until it succeeds, fails for good, or `retry_until` (monotonic) comes.

        Retries errors that may pass: UnavailableError, OverloadedError and NotReadyError; with `_repeats_late_calls`
        also DeadlineError, each time with twice the deadline, because the same call may take as long again.
        """
        may_pass = (UnavailableError, OverloadedError, NotReadyError)
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((*may_pass, DeadlineError) if self._repeats_late_calls else may_pass),
            wait=_BACKOFF,
            stop=stop_after_attempt(1) if retry_until is None else stop_before_delay(retry_until - time.monotonic()),
            before_sleep=self._retries.add,
            reraise=True,
        )
        async for trial in retrying:
            with trial:
                remaining_s = timeout_s if retry_until is None else min(timeout_s, retry_until - time.monotonic())
                number = trial.retry_state.attempt_number - 1
                try:
                    result = await attempt(number, max(_MIN_ATTEMPT_S, remaining_s))
                except DeadlineError:
                    timeout_s *= 2
                    raise
                self._retries.is_failing = False
                return result
        raise AssertionError  # the last trial returns or raises


class _RetryLog:
    """Logs one warning when a server stops answering, not one for each of a thousand calls.

    It is not part of the client, because tenacity keeps it in a cycle of references. So a client that is dropped is
    freed at once, and its channel with it. gRPC ends its threads with the last channel, which is best before the
    process ends.
    """

    def __init__(self, address: str) -> None:
        self.is_failing = False
        self._address = address

    def add(self, state: RetryCallState) -> None:
        """Log the call that `state` is about to repeat."""
        assert state.outcome is not None
        level = log.debug if self.is_failing else log.warning
        level("call.retried", address=self._address, reason=str(state.outcome.exception()))
        self.is_failing = True
