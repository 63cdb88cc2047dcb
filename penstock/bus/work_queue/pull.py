"""Requests to a pull consumer, bounded in messages and in bytes (nats-py's own `fetch` has no bound in bytes).

Invariant: every message that the server has sent is returned by this call or the next one.
"""

import asyncio
import json
import time
from contextlib import suppress

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.bus.failures import BUS_ERRORS

_LOOK_EVERY_S = 0.5
_ANSWER_TIMEOUT_S = 30.0
"""Seconds after its end at which a request is given up. Not sooner: while a large message is in transit on a slow link,
each further request would bring one more message."""
_LOST_AFTER_S = 2.0
"""Seconds after a request's end at which this process looks whether it is lost, as when the server of a cluster that
had it has died. It sends itself a message, which arrives after everything that its server had for it."""
_ROUTE_S = 1.0
"""Seconds that an answer may still take from another server of the cluster."""
NO_MESSAGES = ("404", "408")
"""Statuses of a request that found fewer messages than it asked for."""


class PullRequests:
    """The requests of one process to one durable consumer, one at a time."""

    def __init__(self, client: Client, *, stream: str, durable: str) -> None:
        """Prepare the requests; `open` them before the first one."""
        self._client = client
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._inbox = client.new_inbox()
        self._subscription: Subscription | None = None
        self._arrived: asyncio.Queue[Msg] = asyncio.Queue()
        self._num_requests = 0

    async def open(self) -> None:
        """Start listening for the consumer's messages."""
        self._subscription = await self._client.subscribe(f"{self._inbox}.*", cb=self._arrived.put)

    async def close(self) -> None:
        """Stop listening."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def request(self, batch: int, *, wait_s: float = 0.0, max_bytes: int | None = None) -> tuple[list[Msg], str]:
        """Request at most `batch` messages; return them with the status that ended the request.

        Args:
            batch: The most messages to return.
            wait_s: Seconds that the server waits for a message if it has none.
            max_bytes: The most bytes of all messages together; a single larger message is not sent.

        Returns:
            The messages, and the server's status: "" if the request was answered in full, "503" if nothing listens
            there or no answer came.
        """
        taken: list[Msg] = []
        # Messages that arrived too late for an earlier request.
        while len(taken) < batch and not self._arrived.empty():
            if _status_of(message := self._arrived.get_nowait()) is None:
                taken.append(message)
        if taken:
            return taken, ""
        self._num_requests += 1
        reply = f"{self._inbox}.{self._num_requests}"
        limits: dict[str, int | bool] = {"batch": batch}
        limits |= {"expires": int(wait_s * 1e9)} if wait_s else {"no_wait": True}
        if max_bytes is not None:
            limits["max_bytes"] = max_bytes
        await self._client.publish(self._subject, json.dumps(limits).encode(), reply=reply)
        num_reconnects, ends_at = self._client.stats["reconnects"], time.monotonic() + wait_s
        give_up_at, echo = ends_at + _ANSWER_TIMEOUT_S, ""
        while len(taken) < batch:
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    message = await self._arrived.get()
            except TimeoutError:
                is_lost = not self._client.is_connected or self._client.stats["reconnects"] != num_reconnects
                if is_lost or time.monotonic() > give_up_at:
                    return taken, "503"
                if not echo and time.monotonic() > ends_at + _LOST_AFTER_S:
                    echo = f"{reply}-echo"
                    with suppress(*BUS_ERRORS):
                        await self._client.publish(echo)
                continue
            status = _status_of(message)
            if status is None:
                taken.append(message)
            elif message.subject == echo:
                give_up_at = min(give_up_at, time.monotonic() + _ROUTE_S)
            elif message.subject == reply and status != "100":
                return taken, status
        return taken, ""


def _status_of(message: Msg) -> str | None:
    """Return the status that the message carries; None if it is one of the stream's messages."""
    # A message of a stream has a reply subject for its ack.
    return None if message.reply else (message.headers or {}).get("Status", "")
