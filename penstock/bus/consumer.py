"""Taking messages from a work queue: each is acked, put back, or buried; none is lost.

The one place where Penstock's errors become what happens to a message:

    returned                                        ack
    InvalidRequestError (CorruptMessageError)       dead letter at once
    AccessError                                     nak; no more is taken, and the error is raised
    any other error                                 nak with a growing delay; dead letter after `max_deliveries`
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api

from penstock.bus.connection import Bus, Stream
from penstock.bus.failures import BUS_ERRORS, describe, setting_up
from penstock.errors import AccessError, InvalidRequestError, PenstockError

log = structlog.get_logger()

_FETCH_TIMEOUT_S = 1.0
_LOOK_EVERY_S = 3.0
"""How often a queue that stays empty is looked for on the server."""
_MAX_DELAY_S = 10.0
_MAX_REASON_CHARS = 2000


class Delivery:
    """One message in hand: ack it, put it back, or bury it."""

    def __init__(self, message: Msg, bus: Bus) -> None:
        """Wrap a JetStream message."""
        self._message = message
        self._bus = bus
        self.payload: bytes = message.data
        self.message_id: str = (message.headers or {}).get("Nats-Msg-Id", "")
        self.num_delivered: int = message.metadata.num_delivered

    def forget_payload(self) -> None:
        """Free the bytes of a message that is kept in hand only to be acked later."""
        self.payload = self._message.data = b""

    async def ack(self) -> None:
        """Remove the message from the queue, and wait until the server has said so."""
        await self._settle(self._message.ack_sync(timeout=5.0))

    async def put_back(self, delay_s: float = 0.0) -> None:
        """Let it be delivered again, to anyone, after `delay_s` seconds."""
        await self._settle(self._message.nak(delay=delay_s or None))

    async def bury(self, reason: str) -> None:
        """Move it to the dead letters: a line with the reason, then the payload, cut where both are too long."""
        log.error("message.buried", message_id=self.message_id, reason=reason, num_delivered=self.num_delivered)
        first_line = " ".join(reason.split())[:_MAX_REASON_CHARS].encode() + b"\n"
        message_id = f"dead/{self.message_id}"
        letter = (first_line + self.payload)[: self._bus.max_payload_bytes(message_id)]
        await self._bus.publish(self._bus.dead, letter, message_id=message_id)
        await self.ack()

    @asynccontextmanager
    async def kept_alive(self, interval_s: float) -> AsyncIterator[None]:
        """Tell the server every `interval_s` that the message is being worked on."""

        async def beat() -> None:
            while True:
                await asyncio.sleep(interval_s)
                await self._settle(self._message.in_progress())

        task = asyncio.create_task(beat())
        try:
            yield
        finally:
            task.cancel()

    async def _settle(self, pending: Awaitable[object]) -> None:
        """A word to the server that gets lost costs a redelivery, which every receiver bears; so it is only logged."""
        try:
            await pending
        except BUS_ERRORS as error:
            log.warning("message.settle_failed", message_id=self.message_id, error=describe(error))


class Consumer:
    """A durable pull consumer: processes that use the same name share the queue."""

    def __init__(self, bus: Bus, stream: Stream, durable: str, subscription: JetStreamContext.PullSubscription) -> None:
        """Wrap a subscription; use `open_consumer`."""
        self._bus = bus
        self._stream = stream
        self._subscription = subscription
        self._presence = bus.presence(
            f"consumer {durable} of stream {stream.name}",
            lambda: bus.jetstream.consumer_info(stream.name, durable),
        )
        self._looked_at = time.monotonic()

    async def fetch(self, limit: int) -> list[Delivery]:
        """At most `limit` messages; empty when none came within a second or the server is out of reach for now.

        Raises:
            SetupError: the server has the consumer no more.
        """
        try:
            messages = await self._subscription.fetch(limit, timeout=_FETCH_TIMEOUT_S)
        except (nats.errors.TimeoutError, TimeoutError):
            # So answers a server without the consumer, too.
            if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
                await self._look()
            return []
        except BUS_ERRORS as error:
            log.warning("consumer.fetch_retried", stream=self._stream.name, error=describe(error))
            await self._look()
            await asyncio.sleep(0.5)
            return []
        return [Delivery(message, self._bus) for message in messages]

    async def has_delivered_all(self) -> bool:
        """Whether everything that was stored so far has been fetched; False where the server does not answer."""
        try:
            return (await self._subscription.consumer_info()).num_pending == 0
        except BUS_ERRORS:
            return False

    async def _look(self) -> None:
        self._looked_at = time.monotonic()
        await self._presence.check()


async def open_consumer(
    bus: Bus, stream: Stream, durable: str, *, ack_wait_s: float, max_ack_pending: int, fresh: bool = False
) -> Consumer:
    """The durable consumer `durable` of `stream`, made where it does not exist.

    Args:
        ack_wait_s: A message without a sign of life for so long is delivered again.
        max_ack_pending: The most messages that may be in hand at once.
        fresh: Forget what an earlier holder had in hand, so that all of it is delivered again at once.

    Raises:
        SetupError: the server does not make it.
    """
    js = bus.jetstream
    config = api.ConsumerConfig(
        durable_name=durable,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=ack_wait_s,
        max_deliver=-1,
        max_ack_pending=max_ack_pending,
    )
    with setting_up(f"consumer {durable} of stream {stream.name}", bus.config.url):
        if fresh:
            with suppress(nats.js.errors.NotFoundError):
                await js.delete_consumer(stream.name, durable)
        await js.add_consumer(stream.name, config)
        subscription = await js.pull_subscribe_bind(durable, stream.name)
    return Consumer(bus, stream, durable, subscription)


async def work(
    consumer: Consumer,
    handle: Callable[[Delivery], Awaitable[None]],
    *,
    stop: asyncio.Event,
    concurrency: int,
    heartbeat_s: float,
    max_deliveries: int,
    give_up: Callable[[Delivery, str], Awaitable[None]] | None = None,
    grace_s: float = 5.0,
) -> None:
    """Handle messages, `concurrency` at a time, until `stop`; then running ones get `grace_s` and are put back.

    Args:
        handle: Its return acks the message; its error is mapped as the module says. It must bear being repeated.
        give_up: Called with the reason before a message is buried, so that somebody can be told.

    Raises:
        AccessError: by `handle`. Another process may be let in, so the message is left to it.
    """
    running: set[asyncio.Task[None]] = set()
    refusals: list[AccessError] = []

    async def run(delivery: Delivery) -> None:
        async with delivery.kept_alive(heartbeat_s):
            try:
                await _handle(delivery, handle, max_deliveries=max_deliveries, give_up=give_up)
            except AccessError as error:
                refusals.append(error)

    stopped = asyncio.create_task(stop.wait())
    try:
        while not stop.is_set() and not refusals:
            if len(running) >= concurrency:
                await asyncio.wait({stopped, *running}, return_when=asyncio.FIRST_COMPLETED)
                continue
            for delivery in await consumer.fetch(concurrency - len(running)):
                task = asyncio.create_task(run(delivery))
                running.add(task)
                task.add_done_callback(running.discard)
        if running and not refusals:
            await asyncio.wait(running, timeout=grace_s)
    finally:
        stopped.cancel()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if refusals:
        raise refusals[0]


async def _handle(
    delivery: Delivery,
    handle: Callable[[Delivery], Awaitable[None]],
    *,
    max_deliveries: int,
    give_up: Callable[[Delivery, str], Awaitable[None]] | None,
) -> None:
    try:
        await handle(delivery)
    except (asyncio.CancelledError, AccessError):
        await delivery.put_back()
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if not isinstance(error, PenstockError | TimeoutError):
            log.exception("message.handler_crashed", message_id=delivery.message_id)
        hopeless = isinstance(error, InvalidRequestError)
        if not hopeless and delivery.num_delivered < max_deliveries:
            delay_s = min(_MAX_DELAY_S, 0.25 * 2 ** min(delivery.num_delivered, 10))
            log.warning("message.put_back", message_id=delivery.message_id, reason=reason, delay_s=delay_s)
            await delivery.put_back(delay_s)
            return
        try:
            if give_up is not None:
                await give_up(delivery, reason)
            await delivery.bury(reason)
        except Exception as failure:
            log.exception("message.give_up_failed", message_id=delivery.message_id, error=repr(failure))
            await delivery.put_back(_MAX_DELAY_S)
    else:
        await delivery.ack()
