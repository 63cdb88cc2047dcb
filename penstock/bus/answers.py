"""Repeats a request until NATS answers: while a cluster elects a leader, or one server is frozen or busy.

After a server of a cluster has died there are seconds without a leader, in which no stream is made, changed or removed.
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

ANSWER_S = 30.0
"""Seconds without an answer. A cluster elects a leader after 4 to 9 s of silence; a machine that swaps or a disk that
is busy may hold a server up as long."""
RETRY_S = 0.5


async def until_answered(config: BusConfig, what: str, ask: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    """Return what `ask` does. It is repeated while nobody answers, and must be repeatable.

    Args:
        config: The servers.
        what: What is asked, for the log: "stream run_PROMPTS".
        ask: Asks the servers.

    Raises:
        nats.errors.Error: there is no answer after `ANSWER_S`, or the error is of another kind; also those of
            `BUS_ERRORS`.
    """
    ends_at = time.monotonic() + ANSWER_S
    while True:
        try:
            return await ask()
        except BUS_ERRORS as error:
            is_waited_out = _is_of_an_election if config.is_cluster else _is_silence
            if not is_waited_out(error) or time.monotonic() >= ends_at:
                raise
            log.warning("bus.no_answer", what=what, error=describe(error))
        await asyncio.sleep(RETRY_S)


def _is_of_an_election(error: Exception) -> bool:
    """Return whether the error may be over when there is a leader: no answer, or the answer that there is none."""
    return isinstance(error, nats.js.errors.ServiceUnavailableError) or not isinstance(error, nats.js.errors.APIError)


def _is_silence(error: Exception) -> bool:
    """Return whether the one server has said nothing. What it refuses once it would refuse again."""
    return isinstance(error, TimeoutError)
