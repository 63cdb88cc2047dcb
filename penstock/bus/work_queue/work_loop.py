"""Handles the messages of a work queue: each is acked, put back, or buried; none is lost.

The one place where Penstock's errors become outcomes of messages:

    returned                            ack
    InvalidRequestError, PoisonError    dead letter at once
    DeadlineError                       put back once; then dead letter
    AccessError, SetupError             put back; no more messages are taken, and the error is raised
    any other error                     put back with a growing delay; dead letter after `max_deliveries`
    its process died or froze           delivered again, at last handled alone; then dead letter (`suspects.py`)
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from penstock.bus.failures import deliveries_allowed
from penstock.bus.work_queue.consumer import Consumer, Delivery
from penstock.bus.work_queue.suspects import Suspects, open_suspects
from penstock.errors import AccessError, PenstockError, SetupError
from penstock.runtime.backoff import Backoff
from penstock.telemetry import metrics

log = structlog.get_logger()

_BACKOFF = Backoff(first_s=0.5, max_s=10.0)
_MESSAGES = metrics.counter(
    "penstock_work_messages_total",
    "Messages of a work queue that this process handled, by outcome: acked, put_back or buried.",
    ("outcome",),
)
_IN_HAND = metrics.gauge("penstock_work_messages_in_hand", "Messages of a work queue that this process is handling.")

Handler = Callable[[Delivery], Awaitable[None]]
GiveUp = Callable[[Delivery, str], Awaitable[None]]


async def work(
    consumer: Consumer,
    handle: Handler,
    *,
    stop: asyncio.Event,
    concurrency: int,
    max_deliveries: int,
    give_up: GiveUp | None = None,
    grace_s: float = 5.0,
) -> None:
    """Handle messages, `concurrency` at a time, until `stop`; then running ones get `grace_s` seconds and are put back.

    Args:
        consumer: Source of the messages.
        handle: Its return acks the message; its error is mapped as the module says. It must tolerate repetition.
        stop: Ends the work.
        concurrency: The most messages handled at once.
        max_deliveries: A message that still fails after this many deliveries is buried.
        give_up: Called with the reason before a message is buried, so that the failure can be reported.
        grace_s: Seconds that running messages get after `stop`.

    Raises:
        AccessError: `handle` raised it. The message is left to other processes, which may have access.
        SetupError: `handle` raised it, or the server cannot count deaths. Each delivery would fail until a person
            fixes the cause.
    """
    suspects = await open_suspects(consumer.bus, concurrency=concurrency)
    running: set[asyncio.Task[None]] = set()
    refusals: list[AccessError | SetupError] = []

    async def run(delivery: Delivery) -> None:
        with _IN_HAND.track_inprogress():
            await handle_one(delivery)

    async def handle_one(delivery: Delivery) -> None:
        try:
            await _handle(delivery, handle, suspects, stop, max_deliveries=max_deliveries, give_up=give_up)
        except (AccessError, SetupError) as error:
            refusals.append(error)

    stopped = asyncio.create_task(stop.wait())
    try:
        while not stop.is_set() and not refusals:
            if len(running) >= concurrency:
                await asyncio.wait({stopped, *running}, return_when=asyncio.FIRST_COMPLETED)
                continue
            for delivery in await consumer.fetch(concurrency - len(running)):
                if stop.is_set() or refusals:
                    await delivery.put_back()
                    continue
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
    handle: Handler,
    suspects: Suspects,
    stop: asyncio.Event,
    *,
    max_deliveries: int,
    give_up: GiveUp | None,
) -> None:
    try:
        async with suspects.handling(delivery):
            if stop.is_set():  # it came while the message waited
                raise asyncio.CancelledError
            await handle(delivery)
    except (asyncio.CancelledError, AccessError, SetupError):
        _MESSAGES.labels("put_back").inc()
        await delivery.put_back()
        raise
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise  # the process ends, and its heartbeats with it
    except BaseException as error:  # a panic of Rust code, among others, is no Exception
        reason = f"{type(error).__name__}: {error}"
        if not isinstance(error, PenstockError | TimeoutError):
            log.exception("message.handler_crashed", message_id=delivery.message_id)
        if delivery.num_delivered >= deliveries_allowed(error, max_deliveries):
            await _bury(delivery, reason, give_up)
            return
        delay_s = _BACKOFF.after(delivery.num_delivered)
        _MESSAGES.labels("put_back").inc()
        log.warning("message.put_back", message_id=delivery.message_id, reason=reason, delay_s=delay_s)
        await delivery.put_back(delay_s)
    else:
        _MESSAGES.labels("acked").inc()
        await delivery.ack()


async def _bury(delivery: Delivery, reason: str, give_up: GiveUp | None) -> None:
    try:
        if give_up is not None:
            await give_up(delivery, reason)
        await delivery.bury(reason)
        _MESSAGES.labels("buried").inc()
    except Exception as failure:
        log.exception("message.give_up_failed", message_id=delivery.message_id, error=repr(failure))
        await delivery.put_back(_BACKOFF.max_s)
