"""Waits for answers that a busy link delays, for as long as they may still come.

An answer that was given up still arrives, and is thrown away. If it is large and asked for again, the link has more to
carry than before, so that the next answers come even later.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import nats.errors
from nats.aio.client import Client

from penstock.bus.failures import BUS_ERRORS
from penstock.runtime.process import end_task

AnswerT = TypeVar("AnswerT")

LONGEST_S = 90.0
"""Give requests themselves this time: longer than `awaited` waits."""
_ANSWER_S = 5.0
"""Seconds that a server may take for an answer on an idle link."""
_CARRY_S = 60.0
"""Seconds that a link may take for what a server has sent; a silent connection is left after half of it."""
_ROUTE_S = 1.0
"""Seconds that an answer may still take from another server of the cluster."""
_LOOK_EVERY_S = 0.5


async def awaited(client: Client, answer: Coroutine[Any, Any, AnswerT]) -> AnswerT:
    """Return the answer to a request that was sent over `client`.

    Raises:
        nats.errors.Error: the answer is lost; also any other error of `answer`.
    """
    asking = asyncio.ensure_future(answer)
    losing = asyncio.create_task(_until_lost(client))
    try:
        await asyncio.wait({asking, losing}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise nats.errors.TimeoutError
        return asking.result()
    finally:
        await end_task(losing)
        await end_task(asking)


async def _until_lost(client: Client) -> None:
    """Return when an answer that was due has not come, and everything that the server sent before this call has."""
    num_reconnects = client.stats["reconnects"]
    await asyncio.sleep(_ANSWER_S)
    echo = asyncio.create_task(_echo(client))
    try:
        while not echo.done():
            if not client.is_connected or client.stats["reconnects"] != num_reconnects:
                return
            await asyncio.wait({echo}, timeout=_LOOK_EVERY_S)
    finally:
        await end_task(echo)
    await asyncio.sleep(_ROUTE_S)


async def _echo(client: Client) -> None:
    """Ask where nobody listens: the server says so after everything that it has for this client."""
    with suppress(*BUS_ERRORS):
        await client.request(client.new_inbox(), timeout=_CARRY_S)
