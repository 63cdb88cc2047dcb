"""What an error of NATS means: a server to wait for, or a fault that a person must fix.

Penstock waits without limit for a server that is unreachable, slow or not ready, and for a cluster without a leader.
Three kinds of error are not waited out: a server that has lost what the run stored in it, because nothing brings that
back; a connection that the server has closed for good; and any failure at the start.
"""

import time
from collections.abc import Awaitable, Callable

import nats.errors
import nats.js.errors
from nats.aio.client import Client

from penstock.errors import DeadlineError, InvalidRequestError, PoisonError, SetupError, UnavailableError

BUS_ERRORS = (nats.errors.Error, nats.js.errors.Error, OSError, TimeoutError)
"""Everything nats-py raises if the server refuses, does not answer or is unreachable."""

_GONE_AFTER_S = 2.0
"""Seconds that a "not found" must persist to be believed: a starting server may not know yet what it has."""
_NOT_READY_S = 30.0
"""Seconds that a connected server may be without JetStream."""
NO_LEADER = 10008
"""JetStream's code for a cluster without a leader: it elects one, or waits for servers that are away."""


_DEADLINE_DELIVERIES = 2
"""Each delivery of a message whose handling takes too long costs the whole deadline."""


def deliveries_allowed(error: BaseException, max_deliveries: int) -> int:
    """Return how many deliveries a message gets whose handling failed with `error`; 1: it is not retried."""
    match error:
        case InvalidRequestError() | PoisonError():
            return 1
        case DeadlineError():
            return min(_DEADLINE_DELIVERIES, max_deliveries)
        case _:
            return max_deliveries


def describe(error: BaseException) -> str:
    """Return the error's own message, without the library's prefix."""
    return getattr(error, "description", None) or str(error) or type(error).__name__


def require_open(client: Client, url: str) -> None:
    """Return unless the connection is closed for good: nats-py connects again after an outage, not after an error.

    Raises:
        UnavailableError: the server has closed it, because its token or its bounds have changed, for example.
    """
    if client.is_closed:
        reason = "" if client.last_error is None else f" ({describe(client.last_error)})"
        raise UnavailableError(
            f"NATS at {url} has closed the connection for good{reason}; start this process again, and see that it has "
            "the settings and the token of the server"
        )


class Presence:
    """Checks that the server still has something the run needs; call `check` whenever an operation on it has failed."""

    def __init__(self, client: Client, *, what: str, url: str, look: Callable[[], Awaitable[object]]) -> None:
        """Prepare the check; `look` asks the server, and raises NotFoundError if the server does not have the thing."""
        self._client = client
        self._what = what
        self._url = url
        self._look = look
        self._missing_since: float | None = None
        self._not_ready_since: float | None = None

    async def check(self) -> None:
        """Return if waiting for the server makes sense.

        Raises:
            SetupError: the server no longer has it, or has been without JetStream for too long.
            UnavailableError: the server has closed the connection for good.
        """
        require_open(self._client, self._url)
        if not self._client.is_connected:
            self._missing_since = self._not_ready_since = None
            return
        try:
            await self._look()
        except nats.js.errors.NotFoundError:
            self._missing_since = self._missing_since or time.monotonic()
        except nats.js.errors.ServiceUnavailableError as error:
            if error.err_code != NO_LEADER:
                self._not_ready_since = self._not_ready_since or time.monotonic()
        except BUS_ERRORS:
            return
        else:
            self._missing_since = self._not_ready_since = None
        if _is_past(self._missing_since, _GONE_AFTER_S):
            raise SetupError(
                f"{self._what} is gone from NATS at {self._url}: the server has lost its store, or somebody removed "
                "it; start the processes of the run again (the trainer goes on from its last checkpoint)"
            )
        if _is_past(self._not_ready_since, _NOT_READY_S):
            raise SetupError(
                f"NATS at {self._url} has been running without JetStream for {_NOT_READY_S:g} s; start it with "
                "`penstock serve nats`, then start the processes of the run again"
            )


def _is_past(since: float | None, limit_s: float) -> bool:
    return since is not None and time.monotonic() - since > limit_s
