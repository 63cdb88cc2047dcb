"""The messages of a work queue that this process holds.

Invariant: from fetch until ack, put-back or burial, heartbeats tell the server that a message is being worked on. If
the process dies, the heartbeats stop and the message is delivered again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager, suppress

import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.js import api

from penstock.bus.cluster.creation import create
from penstock.bus.connection import Bus, Stream
from penstock.bus.failures import BUS_ERRORS, describe
from penstock.bus.stored.dead_letters import letter_headers
from penstock.bus.work_queue.pull import NO_MESSAGES, PullRequests
from penstock.runtime.process import end_task

log = structlog.get_logger()

_FETCH_WAIT_S = 1.0
_FETCH_BYTES = 32 * 2**20
"""The most bytes of one fetch: far below the outstanding bytes at which the server cuts a client off (`max_pending`),
and few enough that no message waits unread for long. A single larger message is still fetched."""
_LOOK_EVERY_S = 3.0
"""Seconds between checks that a consumer that delivers nothing still exists."""
_HEARTBEATS_PER_ACK_WAIT = 3
_HEARTBEATS_AT_ONCE = 256
"""Heartbeats sent before other tasks of the process get a turn."""


class Delivery:
    """One message in hand: ack it, put it back, or bury it."""

    def __init__(self, message: Msg, bus: Bus, stream: Stream, in_hand: "dict[int, Delivery]") -> None:
        """Wrap a JetStream message; `in_hand` holds the deliveries that get heartbeats, by sequence number."""
        self._message = message
        self._bus = bus
        self._stream = stream
        self._in_hand = in_hand
        self.payload: bytes = message.data
        self.headers: Mapping[str, str] = message.headers or {}
        self.num_delivered: int = message.metadata.num_delivered
        """Number of this delivery. The server also counts those that arrived while the message was in hand."""
        self.message_id: str = self.headers.get("Nats-Msg-Id", "")
        self.stored_at: float = message.metadata.timestamp.timestamp()
        """Seconds since 1970, by the server's clock, at which it stored the message."""
        self.sequence: int = message.metadata.sequence.stream
        """Its number in its queue, the same at each delivery."""
        in_hand[self.sequence] = self

    @property
    def queue(self) -> str:
        """Name of the stream that holds it."""
        return self._stream.name

    def renew(self, message: Msg) -> None:
        """Continue with another delivery of the same message, which arrived because heartbeats were late.

        `num_delivered` stays, since nobody failed at the message meanwhile, and so does the payload: the bytes that
        came again are freed.
        """
        message.data = b""
        self._message = message

    def forget_payload(self) -> None:
        """Free the bytes of a message that is kept in hand only to be acked later."""
        self.payload = self._message.data = b""

    async def ack(self) -> None:
        """Remove the message from the queue, and wait until the server has confirmed it."""
        await self._settle(self._message.ack_sync(timeout=5.0))

    async def put_back(self, delay_s: float = 0.0) -> None:
        """Let the message be delivered again, to any process, after `delay_s` seconds."""
        await self._settle(self._message.nak(delay=delay_s or None))

    async def bury(self, reason: str) -> None:
        """Move the message to the dead letters, with its reason, its queue and its id."""
        await self.write_dead_letter(reason)
        await self.ack()

    async def write_dead_letter(self, reason: str) -> None:
        """Copy the message to the dead letters, and keep it in hand to be acked later."""
        log.error("message.buried", message_id=self.message_id, reason=reason, num_delivered=self.num_delivered)
        await self._bus.publish(
            self._bus.dead,
            self.payload,
            message_id=f"dead/{self.queue}/{self.sequence}",
            headers=letter_headers(reason=reason, subject=self._stream.subject, message_id=self.message_id),
        )

    async def heartbeat(self) -> None:
        """Tell the server that the message is being worked on."""
        await self._message.in_progress()

    async def _settle(self, pending: Awaitable[object]) -> None:
        """Send the outcome; if it is lost, the message is delivered again, which every receiver tolerates."""
        self._in_hand.pop(self.sequence, None)
        try:
            await pending
        except BUS_ERRORS as error:
            log.warning("message.settle_failed", message_id=self.message_id, error=describe(error))


class Consumer:
    """A durable pull consumer; processes that use the same name share the queue."""

    def __init__(self, bus: Bus, stream: Stream, durable: str, pull: PullRequests) -> None:
        """Use `consuming`."""
        self._bus = bus
        self._stream = stream
        self._durable = durable
        self._pull = pull
        self._in_hand: dict[int, Delivery] = {}
        self._presence = bus.presence(
            f"consumer {durable} of stream {stream.name}",
            lambda: bus.jetstream.consumer_info(stream.name, durable),
        )
        self._looked_at = time.monotonic()

    async def fetch(self, limit: int) -> list[Delivery]:
        """Return at most `limit` messages and 32 MiB, or one message that is larger.

        Empty if no message came within a second, or if the server is unreachable.

        Raises:
            SetupError: the server no longer has the consumer.
        """
        messages, status = await self._request(1, wait_s=_FETCH_WAIT_S)
        room = _FETCH_BYTES - sum(len(message.data) for message in messages)
        if messages and len(messages) < limit and room > 0:
            messages += (await self._request(limit - len(messages), max_bytes=room))[0]
        if not messages:
            if status not in NO_MESSAGES:
                await asyncio.sleep(0.5)
            if status not in NO_MESSAGES or time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
                self._looked_at = time.monotonic()
                await self._presence.check()
        return [delivery for message in messages if (delivery := self._take(message)) is not None]

    async def _request(self, batch: int, *, wait_s: float = 0.0, max_bytes: int | None = None) -> tuple[list[Msg], str]:
        """Call `PullRequests.request`; return no messages and "503" if the server is unreachable."""
        try:
            return await self._pull.request(batch, wait_s=wait_s, max_bytes=max_bytes)
        except BUS_ERRORS as error:
            log.warning("consumer.fetch_retried", stream=self._stream.name, error=describe(error))
            return [], "503"

    def _take(self, message: Msg) -> Delivery | None:
        """Wrap a message; None if an earlier delivery of it is in hand, which continues with this one."""
        if (known := self._in_hand.get(message.metadata.sequence.stream)) is not None:
            known.renew(message)
            return None
        return Delivery(message, self._bus, self._stream, self._in_hand)

    @property
    def bus(self) -> Bus:
        """The bus that holds the queue."""
        return self._bus

    @property
    def num_in_hand(self) -> int:
        """Messages fetched, but neither acked nor put back."""
        return len(self._in_hand)

    async def has_delivered_all(self) -> bool:
        """Return whether this process holds all stored messages; only for a consumer that no other process uses.

        A message lost in transit counts as missing until it is delivered again. False if the server does not answer.
        """
        try:
            info = await self._bus.jetstream.consumer_info(self._stream.name, self._durable)
        except BUS_ERRORS:
            return False
        return info.num_pending == 0 and (info.num_ack_pending or 0) <= len(self._in_hand)

    async def beat(self) -> None:
        """Send a heartbeat for every message in hand."""
        for number, (sequence, delivery) in enumerate(list(self._in_hand.items()), start=1):
            if sequence in self._in_hand:
                with suppress(*BUS_ERRORS):  # reconnecting; the next round comes soon
                    await delivery.heartbeat()
            if number % _HEARTBEATS_AT_ONCE == 0:
                await asyncio.sleep(0)


@asynccontextmanager
async def consuming(
    bus: Bus, stream: Stream, durable: str, *, ack_wait_s: float, max_ack_pending: int, fresh: bool = False
) -> AsyncIterator[Consumer]:
    """Use the durable consumer `durable` of `stream` during the context; create it if it does not exist.

    Args:
        bus: The run's bus.
        stream: The queue.
        durable: The consumer's name.
        ack_wait_s: A message without a heartbeat for this long is delivered again. Three heartbeats are sent in that
            time.
        max_ack_pending: The most messages that may be in hand at once, in all processes together; -1: any number.
        fresh: Forget the messages that an earlier process held, so that they are delivered again at once.

    Raises:
        SetupError: the server does not create it.
    """
    js = bus.jetstream
    config = api.ConsumerConfig(
        durable_name=durable,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=ack_wait_s,
        max_deliver=-1,
        max_ack_pending=max_ack_pending,
    )
    pull = PullRequests(bus.client, stream=stream.name, durable=durable)
    is_forgotten = not fresh

    async def open_consumer() -> None:
        nonlocal is_forgotten
        if not is_forgotten:
            with suppress(nats.js.errors.NotFoundError):
                await js.delete_consumer(stream.name, durable)
            is_forgotten = True
        await js.add_consumer(stream.name, config)

    await create(bus.config, f"consumer {durable} of stream {stream.name}", open_consumer)
    await pull.open()
    consumer = Consumer(bus, stream, durable, pull)

    async def keep_beating() -> None:
        while True:
            await asyncio.sleep(ack_wait_s / _HEARTBEATS_PER_ACK_WAIT)
            await consumer.beat()

    beating = asyncio.create_task(keep_beating())
    try:
        yield consumer
    finally:
        await end_task(beating)
        with suppress(*BUS_ERRORS):
            await pull.close()
