"""Waits for a cluster's election.

After a server has died there are seconds without a leader, in which no stream is made, changed or removed.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import nats.js.errors
import structlog

from penstock.bus.failures import BUS_ERRORS, describe
from penstock.config import BusConfig

log = structlog.get_logger()

AnswerT = TypeVar("AnswerT")

ELECTION_S = 30.0
"""Seconds that a cluster may be without a leader. Servers elect one after 4 to 9 s of silence."""
RETRY_S = 0.5


async def through_election(config: BusConfig, what: str, attempt: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    """Return what `attempt` does. In a cluster it is repeated while there is no leader, and must be repeatable.

    Args:
        config: The servers.
        what: What is attempted, for the log: "stream run_PROMPTS".
        attempt: Asks the servers.

    Raises:
        nats.errors.Error: there is no leader after `ELECTION_S`, or the error is of another kind; also those of
            `BUS_ERRORS`.
    """
    ends_at = time.monotonic() + (ELECTION_S if config.is_cluster else 0.0)
    while True:
        try:
            return await attempt()
        except BUS_ERRORS as error:
            if not _is_of_an_election(error) or time.monotonic() >= ends_at:
                raise
            log.warning("bus.no_leader", what=what, error=describe(error))
        await asyncio.sleep(RETRY_S)


def _is_of_an_election(error: Exception) -> bool:
    """Return whether the error may be over when there is a leader: no answer, or the answer that there is none."""
    return isinstance(error, nats.js.errors.ServiceUnavailableError) or not isinstance(error, nats.js.errors.APIError)
