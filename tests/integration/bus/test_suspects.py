"""A message that kills its handlers is given up, and those that were handled beside it are not."""

import asyncio
import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from nats.js.kv import KeyValue
from structlog.testing import capture_logs

from penstock.bus.connection import Bus
from penstock.bus.work_queue import work_loop
from penstock.bus.work_queue.consumer import Delivery
from penstock.bus.work_queue.suspects import MAX_DEATHS, open_suspects
from penstock.bus.work_queue.work_loop import work
from penstock.errors import UnavailableError
from penstock.runtime.backoff import Backoff
from services.launch.supervisor import MAX_RESTARTS
from tests.support.bus.work_queue import OpenConsumer, fetch_one, num_messages
from tests.support.waiting import HANG_S, promptly, settled, until


async def test_a_message_that_kills_its_process_is_buried_and_its_neighbours_are_handled(
    bus: Bus, run_name: str
) -> None:
    """kill -9 at every delivery, three times with two others in hand: these are handled alone, and end."""
    for payload in (b"one", b"two", b"kills"):
        await bus.publish(bus.prompts, payload, message_id=payload.decode())
    ends = []
    while not ends or (ends[-1] == -signal.SIGKILL and len(ends) <= 2 * MAX_DEATHS):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.bus.killed_process", bus.config.url, run_name, str(len(ends) + 1))
        )
        ends.append(await asyncio.wait_for(process.wait(), 2 * HANG_S))
    assert ends == [-signal.SIGKILL] * (MAX_DEATHS + 1) + [0]
    groups = [await bus.jetstream.get_msg(bus.groups.name, seq=number) for number in (1, 2)]
    assert {group.data for group in groups} == {b"one", b"two"}
    letter = await bus.jetstream.get_last_msg(bus.dead.name, bus.dead.subject)
    assert (letter.data, await num_messages(bus, bus.dead.name)) == (b"kills", 1)
    assert letter.headers is not None
    assert f"killed, crashed or froze at delivery after delivery, {MAX_DEATHS}" in letter.headers["Penstock-Reason"]


def test_two_such_prompts_in_a_row_do_not_end_the_run() -> None:
    """They are given up before the only worker of a run has died too often without a trained step."""
    assert 2 * (MAX_DEATHS + 1) <= MAX_RESTARTS


async def test_a_process_that_stops_in_order_has_not_died(workers: OpenConsumer, bus: Bus) -> None:
    """What it puts back is handled by others, however often that happens."""
    begun, handled = asyncio.Event(), list[int]()

    async def hang(delivery: Delivery) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def handle(delivery: Delivery) -> None:
        handled.append(delivery.num_delivered)

    async def is_empty() -> bool:
        return await num_messages(bus, bus.prompts.name) == 0

    await bus.publish(bus.prompts, b"long", message_id="a")
    consumer, num_stops = await workers(bus, ack_wait_s=60.0), 2 * MAX_DEATHS
    for handler in (*[hang] * num_stops, handle):
        begun.clear()
        stop = asyncio.Event()
        options = {"stop": stop, "concurrency": 1, "max_deliveries": 3, "grace_s": 0.0}
        working = asyncio.create_task(work(consumer, handler, **options))
        await (promptly(begun.wait()) if handler is hang else until(is_empty))
        stop.set()
        await promptly(working)
    assert handled == [num_stops + 1]
    assert await num_messages(bus, bus.dead.name) == 0


async def test_a_process_that_stops_as_a_message_was_handled_has_not_died(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count is lowered also if the stop comes while it is."""
    suspects, deaths = await open_suspects(bus, concurrency=1), await bus.bucket("deaths", ttl_s=24 * 3600.0)
    delivery: Any = SimpleNamespace(queue="queue", sequence=1, num_delivered=2, message_id="a")
    put, written, may_lower = bus.put, list[bytes](), asyncio.Event()

    async def write(bucket: KeyValue, key: str, value: bytes) -> None:
        written.append(value)
        if value == b"0":
            await may_lower.wait()
        await put(bucket, key, value)

    async def handle() -> None:
        async with suspects.handling(delivery):
            pass

    monkeypatch.setattr(bus, "put", write)
    handling = asyncio.create_task(handle())
    await until(lambda: written == [b"1", b"0"])
    for _ in range(2):  # as a second Ctrl-C does
        handling.cancel()
        await settled()
        assert not handling.done()
    may_lower.set()
    with pytest.raises(asyncio.CancelledError):
        await promptly(handling)
    assert (await deaths.get("queue.1")).value == b"0"


async def test_one_that_waits_to_be_handled_alone_is_overtaken_by_none(workers: OpenConsumer, bus: Bus) -> None:
    """Messages that arrive meanwhile are handled after it, however many; else it would wait as long as any arrive."""
    ends = {payload: asyncio.Event() for payload in (b"long", b"longer")}
    begun = list[bytes]()

    async def handle(delivery: Delivery) -> None:
        begun.append(delivery.payload)
        if delivery.payload in ends:
            await ends[delivery.payload].wait()

    async def is_empty() -> bool:
        return await num_messages(bus, bus.prompts.name) == 0

    await bus.publish(bus.prompts, b"suspect", message_id="suspect")
    consumer, stop = await workers(bus, ack_wait_s=60.0), asyncio.Event()
    suspect = await fetch_one(consumer)
    deaths = await bus.bucket("deaths", ttl_s=24 * 3600.0)
    await deaths.put(f"{suspect.queue}.{suspect.sequence}", b"%d" % (MAX_DEATHS - 1))
    for payload in ends:
        await bus.publish(bus.prompts, payload, message_id=payload.decode())
    with capture_logs() as events:
        working = asyncio.create_task(work(consumer, handle, stop=stop, concurrency=4, max_deliveries=3))
        await until(lambda: len(begun) == 2)
        await suspect.put_back()
        await until(lambda: "suspect.handled_alone" in [event["event"] for event in events])
        for number in range(4):
            await bus.publish(bus.prompts, b"new", message_id=f"new/{number}")
        await until(lambda: consumer.num_in_hand == 4)  # one of them waits already
        ends[b"long"].set()
        ends[b"longer"].set()
        await until(is_empty)
        stop.set()
        await promptly(working)
    assert begun[2:] == [b"suspect", *[b"new"] * 4]


async def test_a_handler_that_fails_has_not_died(
    workers: OpenConsumer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often: what it raised is told by its own reason."""
    monkeypatch.setattr(work_loop, "_BACKOFF", Backoff(first_s=0.01, max_s=0.01))
    handled = list[int]()

    async def handle(delivery: Delivery) -> None:
        handled.append(delivery.num_delivered)
        if len(handled) <= 2 * MAX_DEATHS:
            raise UnavailableError("away")

    async def is_empty() -> bool:
        return await num_messages(bus, bus.prompts.name) == 0

    await bus.publish(bus.prompts, b"x", message_id="a")
    stop = asyncio.Event()
    options = {"stop": stop, "concurrency": 1, "max_deliveries": 20}
    working = asyncio.create_task(work(await workers(bus, ack_wait_s=60.0), handle, **options))
    await until(is_empty)
    stop.set()
    await promptly(working)
    assert handled == list(range(1, 2 * MAX_DEATHS + 2))
    assert await num_messages(bus, bus.dead.name) == 0
