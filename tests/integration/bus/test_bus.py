"""The work queues on a real nats-server: published once, delivered until settled."""

import asyncio
import signal
import sys
import time

import nats.errors
import nats.js.errors
import pytest
from nats.aio.msg import Msg

from penstock.bus.connection import Bus, connect
from penstock.config import BusConfig
from penstock.errors import (
    InvalidRequestError,
)
from tests.support.bus.work_queue import OpenConsumer, fetch_one, num_messages, until_beaten
from tests.support.waiting import HANG_S, promptly

_HOLD_ONE_MESSAGE = """
import asyncio, sys
from penstock.bus.connection import connect
from penstock.bus.work_queue.consumer import consuming
from penstock.config import BusConfig

async def main(url, run):
    async with (
        connect(BusConfig(url=url), run=run) as bus,
        consuming(bus, bus.prompts, "workers", ack_wait_s=8.0, max_ack_pending=10) as consumer,
    ):
        [delivery] = await consumer.fetch(1)
        sys.stdout.write("holding\\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_the_same_message_id_is_stored_once(workers: OpenConsumer, bus: Bus) -> None:
    """A repeated publish changes nothing and says so."""
    assert (await bus.publish(bus.prompts, b"first", message_id="a")).is_new
    assert not (await bus.publish(bus.prompts, b"again", message_id="a")).is_new
    assert (await bus.publish(bus.prompts, b"other", message_id="b")).is_new
    assert await num_messages(bus, bus.prompts.name) == 2
    delivery = await fetch_one(await workers(bus))
    assert (delivery.payload, delivery.message_id, delivery.num_delivered) == (b"first", "a", 1)


async def test_runs_share_a_server_without_meeting(bus: Bus, bus_config: BusConfig) -> None:
    """Another run has streams of its own."""
    async with connect(bus_config, run="another-run") as other:
        await other.ensure_streams()
        await bus.publish(bus.prompts, b"mine", message_id="a")
        assert await num_messages(other, other.prompts.name) == 0
        await other.delete_run()


async def test_a_killed_consumers_message_is_delivered_again(
    workers: OpenConsumer, bus: Bus, bus_config: BusConfig, run_name: str
) -> None:
    """A holder that beats and is then killed with -9 loses its message to another within seconds, not before."""
    await bus.publish(bus.prompts, b"work", message_id="a")
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _HOLD_ONE_MESSAGE, bus_config.url, run_name, stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    assert await promptly(holder.stdout.readline()) == b"holding\n"
    consumer = await workers(bus, ack_wait_s=8.0)
    await until_beaten(bus, 4)  # longer than the ack wait
    assert await consumer.fetch(1) == []
    holder.send_signal(signal.SIGKILL)
    await holder.wait()
    delivery = await fetch_one(consumer)
    assert (delivery.payload, delivery.num_delivered) == (b"work", 2)
    await delivery.ack()
    assert await num_messages(bus, bus.prompts.name) == 0


async def test_what_is_delivered_again_takes_no_memory_again(workers: OpenConsumer, bus: Bus) -> None:
    """A message whose bytes were freed stays in hand for its receipt, also while heartbeats are late."""
    await bus.publish(bus.prompts, b"large", message_id="a")
    consumer = await workers(bus, ack_wait_s=60.0)
    delivery = await fetch_one(consumer)
    delivery.forget_payload()
    first = delivery._message
    await first.nak()  # the server delivers it at once, as it does after ack_wait
    async with asyncio.timeout(HANG_S):
        while delivery._message is first:
            assert await consumer.fetch(1) == []
    assert (delivery.payload, delivery._message.data, consumer.num_in_hand) == (b"", b"", 1)
    await delivery.ack()
    assert await num_messages(bus, bus.prompts.name) == 0


async def test_a_message_put_back_waits_for_its_delay(workers: OpenConsumer, bus: Bus) -> None:
    """It comes again, no sooner; one that is published meanwhile comes too."""
    await bus.publish(bus.prompts, b"x", message_id="a")
    consumer = await workers(bus, ack_wait_s=30.0)
    delivery = await fetch_one(consumer)
    began = time.monotonic()
    await delivery.put_back(2.0)
    await bus.publish(bus.prompts, b"y", message_id="b")
    fetched_after_s = {}
    for _ in range(2):
        each = await fetch_one(consumer)
        fetched_after_s[each.payload, each.num_delivered] = time.monotonic() - began
    assert fetched_after_s.keys() == {(b"y", 1), (b"x", 2)}
    assert fetched_after_s[b"x", 2] >= 2.0


async def test_a_fresh_consumer_gets_all_that_was_in_hand(workers: OpenConsumer, bus: Bus) -> None:
    """After a restart of the only reader nothing waits for ack_wait."""
    for name in "abc":
        await bus.publish(bus.prompts, name.encode(), message_id=name)
    before = await workers(bus, ack_wait_s=60.0)
    held = [await fetch_one(before) for _ in range(3)]
    await held[1].ack()
    after = await workers(bus, ack_wait_s=60.0, fresh=True)
    assert [(await fetch_one(after)).payload for _ in range(2)] == [b"a", b"c"]


async def test_an_oversized_payload_is_refused_and_the_largest_is_taken(bus: Bus) -> None:
    """The bound counts the header in: one byte less is stored, and the connection lives on."""
    largest = bus.max_payload_bytes("big")
    with pytest.raises(
        InvalidRequestError, match=r"message big of \d+ bytes is over .*max_payload = .*raise max_payload"
    ):
        await bus.publish(bus.groups, bytes(largest + 1), message_id="big")
    assert (await bus.publish(bus.groups, bytes(largest), message_id="big")).is_new
    assert (await bus.publish(bus.groups, b"small", message_id="small")).is_new


async def test_the_largest_message_can_be_buried(workers: OpenConsumer, bus: Bus) -> None:
    """The dead letter has all of it, with the longest reason beside it."""
    payload = b"x" * bus.max_payload_bytes("a")
    await bus.publish(bus.prompts, payload, message_id="a")
    delivery = await fetch_one(await workers(bus, ack_wait_s=30.0))
    await delivery.bury("ü" * 5000)
    assert await num_messages(bus, bus.prompts.name) == 0
    dead = await bus.jetstream.get_last_msg(bus.dead.name, bus.dead.subject)
    assert dead.data == payload
    assert dead.headers is not None
    assert dead.headers["Penstock-Reason"] == "\\xfc" * 500


async def test_a_fetch_is_bounded_in_bytes(workers: OpenConsumer, bus: Bus) -> None:
    """At most 32 MiB at a time, whatever the count allows; a message that is larger than what is left waits."""
    size_bytes = 10 * 2**20
    for name in "abcde":
        await bus.publish(bus.prompts, bytes(size_bytes), message_id=name)
    consumer = await workers(bus, ack_wait_s=30.0)
    fetched = [await consumer.fetch(64) for _ in range(2)]
    assert [[delivery.message_id for delivery in deliveries] for deliveries in fetched] == [list("abc"), list("de")]


async def test_a_message_in_hand_outlives_a_request_that_fails(
    workers: OpenConsumer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch asks for one message, and then for the rest: if the server is away for that, it returns the one."""
    for name in "ab":
        await bus.publish(bus.prompts, name.encode(), message_id=name)
    consumer = await workers(bus, ack_wait_s=30.0)
    publish = bus.client.publish

    async def fail_at_the_rest(subject: str, payload: bytes = b"", **options) -> None:
        if b"max_bytes" in payload:
            raise nats.errors.OutboundBufferLimitError
        await publish(subject, payload, **options)

    with monkeypatch.context() as patched:
        patched.setattr(bus.client, "publish", fail_at_the_rest)
        fetched = await consumer.fetch(8)
    assert [(each.payload, each.num_delivered) for each in fetched] == [(b"a", 1)]
    assert [each.payload for each in await consumer.fetch(8)] == [b"b"]


async def test_a_message_lost_on_its_way_is_missed_and_comes_again(workers: OpenConsumer, bus: Bus) -> None:
    """The server counts it as delivered; "all is here" is said only when it has come after the ack wait."""
    for name in "ab":
        await bus.publish(bus.prompts, name.encode(), message_id=name)
    consumer = await workers(bus, ack_wait_s=1.0)
    lost = asyncio.Event()

    async def lose(_: Msg) -> None:
        lost.set()

    await bus.client.subscribe("nobody.reads", cb=lose)
    await bus.client.publish(
        f"$JS.API.CONSUMER.MSG.NEXT.{bus.prompts.name}.workers", b'{"batch": 1}', reply="nobody.reads"
    )
    await promptly(lost.wait())
    fetched = [await fetch_one(consumer)]
    assert not await consumer.has_delivered_all()
    fetched.append(await fetch_one(consumer))
    assert await consumer.has_delivered_all()
    assert {(each.payload, each.num_delivered) for each in fetched} == {(b"a", 2), (b"b", 1)}
