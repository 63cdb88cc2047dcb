"""Handling messages: acked, put back, or buried with the reason; none is lost, also at the end."""

import asyncio
import contextlib
from unittest.mock import patch

import pytest
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from penstock.bus.connection import Bus
from penstock.bus.failures import deliveries_allowed
from penstock.bus.work_queue.consumer import Consumer, Delivery
from penstock.bus.work_queue.work_loop import work
from penstock.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    PoisonError,
    UnavailableError,
)
from tests.support.bus.work_queue import OpenConsumer, fetch_one, num_messages, until_beaten
from tests.support.waiting import HANG_S, promptly, until


@contextlib.asynccontextmanager
async def working(consumer: Consumer, handle, **options):
    stop = asyncio.Event()
    settings = {"concurrency": 4, "max_deliveries": 3} | options
    task = asyncio.create_task(work(consumer, handle, stop=stop, **settings))
    try:
        yield stop
    finally:
        stop.set()
        await promptly(task)


async def test_work_longer_than_the_ack_wait_is_handled_once(workers: OpenConsumer, bus: Bus) -> None:
    """Beats keep a message with its handler; its return removes it from the queue."""
    handled: list[int] = []

    async def handle(delivery: Delivery) -> None:
        handled.append(delivery.num_delivered)
        await until_beaten(bus, 7)

    async def is_empty() -> bool:
        return await num_messages(bus, bus.prompts.name) == 0

    await bus.publish(bus.prompts, b"long", message_id="a")
    async with working(await workers(bus, ack_wait_s=1.0), handle):
        await until(is_empty)
    assert handled == [1]


async def test_late_heartbeats_are_not_counted_as_failures(workers: OpenConsumer, bus: Bus) -> None:
    """A process that was busy for longer than the ack wait gets its own message again, and goes on with it."""
    await bus.publish(bus.prompts, b"long", message_id="a")
    consumer = await workers(bus)
    delivery = await fetch_one(consumer)
    arrived, renew = asyncio.Event(), delivery.renew

    def note(message: Msg) -> None:
        renew(message)
        arrived.set()

    async def be_late() -> None:
        """Send no heartbeat."""

    with patch.multiple(delivery, renew=note, heartbeat=be_late):
        async with asyncio.timeout(HANG_S):
            while not arrived.is_set():
                assert await consumer.fetch(1) == []
    assert (delivery.num_delivered, consumer.num_in_hand) == (1, 1)
    await delivery.ack()
    assert await num_messages(bus, bus.prompts.name) == 0


async def test_a_hopeless_message_is_buried_at_once(workers: OpenConsumer, bus: Bus) -> None:
    """InvalidRequestError: told to `give_up`, moved to the dead letters with its reason, not tried again."""
    given_up: list[str] = []

    async def handle(delivery: Delivery) -> None:
        raise InvalidRequestError("profile 'x'\nis unknown")

    async def give_up(delivery: Delivery, reason: str) -> None:
        given_up.append(reason)

    async def is_buried() -> bool:
        return await num_messages(bus, bus.prompts.name) == 0

    await bus.publish(bus.prompts, b"payload\nof two lines", message_id="a")
    async with working(await workers(bus, ack_wait_s=60.0), handle, give_up=give_up):
        await until(is_buried)
    assert given_up == ["InvalidRequestError: profile 'x'\nis unknown"]
    dead = await bus.jetstream.get_last_msg(bus.dead.name, bus.dead.subject)
    assert dead.data == b"payload\nof two lines"
    assert dead.headers is not None
    assert dead.headers["Penstock-Reason"] == "InvalidRequestError: profile 'x' is unknown"
    assert (dead.headers["Penstock-Subject"], dead.headers["Penstock-Message-Id"]) == (bus.prompts.subject, "a")


async def test_a_failing_message_is_tried_again_with_growing_delay_then_buried(workers: OpenConsumer, bus: Bus) -> None:
    """Any other error is retried up to max_deliveries; the delay doubles."""

    async def handle(delivery: Delivery) -> None:
        raise OverloadedError("full") if delivery.num_delivered < 3 else ValueError("a bug")

    async def is_buried() -> bool:
        return await num_messages(bus, bus.dead.name) == 1

    await bus.publish(bus.prompts, b"x", message_id="a")
    with capture_logs() as events:
        async with working(await workers(bus, ack_wait_s=60.0), handle, max_deliveries=3):
            await until(is_buried)
    assert [event["delay_s"] for event in events if event["event"] == "message.put_back"] == [0.5, 1.0]
    assert await num_messages(bus, bus.prompts.name) == 0


async def test_what_is_no_exception_is_a_failure_too(workers: OpenConsumer, bus: Bus) -> None:
    """A panic of Rust code, among others: its message would have been in hand for ever, and never delivered again."""

    class Panic(BaseException):
        pass

    async def handle(delivery: Delivery) -> None:
        raise Panic("index out of bounds")

    async def is_buried() -> bool:
        return await num_messages(bus, bus.dead.name) == 1

    await bus.publish(bus.prompts, b"x", message_id="a")
    consumer = await workers(bus, ack_wait_s=60.0)
    with capture_logs() as events:
        async with working(consumer, handle, max_deliveries=2):
            await until(is_buried)
    assert [event["event"] for event in events] == [
        *("message.handler_crashed", "message.put_back", "message.handler_crashed", "message.buried")
    ]
    assert consumer.num_in_hand == 0


async def test_a_message_is_kept_when_giving_it_up_fails(workers: OpenConsumer, bus: Bus) -> None:
    """A message is buried only after somebody could be told."""
    attempts: list[str] = []

    async def handle(delivery: Delivery) -> None:
        raise InvalidRequestError("never")

    async def give_up(delivery: Delivery, reason: str) -> None:
        attempts.append(reason)
        raise OverloadedError("nobody listens")

    async def was_tried() -> bool:
        return len(attempts) > 0

    await bus.publish(bus.prompts, b"x", message_id="a")
    async with working(await workers(bus, ack_wait_s=60.0), handle, give_up=give_up):
        await until(was_tried)
    assert await num_messages(bus, bus.prompts.name) == 1
    assert await num_messages(bus, bus.dead.name) == 0


async def test_stop_does_not_wait_for_long_work_and_loses_none(workers: OpenConsumer, bus: Bus) -> None:
    """With every place taken, `stop` ends `work` after the grace; what ran is put back for others at once."""
    begun = asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        begun.set()
        await asyncio.Event().wait()

    await bus.publish(bus.prompts, b"x", message_id="a")
    consumer = await workers(bus, ack_wait_s=60.0)
    async with working(consumer, handle, concurrency=1, grace_s=0.2) as stop:
        await promptly(begun.wait())
        stop.set()
    assert (await fetch_one(consumer)).num_delivered == 2


async def test_cancelling_work_cancels_and_puts_back_what_runs(workers: OpenConsumer, bus: Bus) -> None:
    """No handler outlives `work`."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    await bus.publish(bus.prompts, b"x", message_id="a")
    consumer = await workers(bus, ack_wait_s=60.0)
    task = asyncio.create_task(work(consumer, handle, stop=asyncio.Event(), concurrency=2, max_deliveries=3))
    await promptly(begun.wait())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert (await fetch_one(consumer)).num_delivered == 2


async def test_no_more_than_concurrency_at_once_and_every_message_once(workers: OpenConsumer, bus: Bus) -> None:
    """Thirty messages, three at a time: all handled, once each, never four at a time."""
    running, most, seen, full = 0, 0, list[bytes](), asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            full.set()
        await full.wait()
        await bus.client.flush()  # others could begin meanwhile
        running -= 1
        seen.append(delivery.payload)

    async def are_done() -> bool:
        return len(seen) == 30

    for index in range(30):
        await bus.publish(bus.prompts, str(index).encode(), message_id=str(index))
    async with working(await workers(bus, ack_wait_s=60.0), handle, concurrency=3):
        await until(are_done)
    assert most == 3
    assert sorted(seen, key=int) == [str(index).encode() for index in range(30)]


@pytest.mark.parametrize(
    ("error", "allowed"),
    [
        (InvalidRequestError("never"), 1),
        (PoisonError("killed three engines"), 1),
        (DeadlineError("too slow"), 2),
        (UnavailableError("away"), 20),
        (ValueError("a bug"), 20),
    ],
)
def test_how_often_a_message_is_delivered_depends_on_why_it_failed(error: Exception, allowed: int) -> None:
    """What cannot succeed is tried once, what takes too long twice, everything else up to the setting."""
    assert deliveries_allowed(error, 20) == allowed
    assert deliveries_allowed(error, 1) == 1
