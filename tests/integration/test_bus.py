"""The work queues on a real nats-server: published once, handled until acked, buried when hopeless."""

import asyncio
import contextlib
import os
import signal
import sys
import unittest.mock
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import nats.errors
import nats.js.errors
import pytest
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from penstock.bus.connection import Bus, connect
from penstock.bus.consumer import Consumer, Delivery, consuming
from penstock.bus.failures import deliveries_allowed
from penstock.bus.local_server import local_server
from penstock.bus.work_loop import work
from penstock.config import BusConfig
from penstock.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    PoisonError,
    SetupError,
    UnavailableError,
)
from tests.support.waiting import HANG_S, promptly, until

_HOLD_ONE_MESSAGE = """
import asyncio, sys
from penstock.bus.connection import connect
from penstock.bus.consumer import consuming
from penstock.config import BusConfig

async def main(url, run):
    async with (
        connect(BusConfig(url=url), run=run) as bus,
        consuming(bus, bus.prompts, "workers", ack_wait_s=1.0, max_ack_pending=10) as consumer,
    ):
        [delivery] = await consumer.fetch(1)
        sys.stdout.write("holding\\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


OpenConsumer = Callable[..., Awaitable[Consumer]]


@pytest.fixture
async def workers() -> AsyncIterator[OpenConsumer]:
    """What opens the workers' consumer; all of them end with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_one(bus: Bus, *, ack_wait_s: float = 1.0, fresh: bool = False) -> Consumer:
            opening = consuming(bus, bus.prompts, "workers", ack_wait_s=ack_wait_s, max_ack_pending=100, fresh=fresh)
            return await stack.enter_async_context(opening)

        yield open_one


async def fetch_one(consumer: Consumer) -> Delivery:
    async with asyncio.timeout(HANG_S):
        while True:
            for delivery in await consumer.fetch(1):
                return delivery


async def num_messages(bus: Bus, stream: str) -> int:
    return (await bus.jetstream.stream_info(stream)).state.messages


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


async def until_beaten(bus: Bus, num_beats: int) -> None:
    """Wait for heartbeats of the workers' consumer; there are three in the time of an ack wait."""
    beats = await bus.client.subscribe(f"$JS.ACK.{bus.prompts.name}.workers.>")
    for _ in range(num_beats):
        assert (await beats.next_msg(HANG_S)).data == b"+WPI"
    await beats.unsubscribe()


async def test_the_same_message_id_is_stored_once(workers: OpenConsumer, bus: Bus) -> None:
    """A repeated publish changes nothing and says so."""
    assert await bus.publish(bus.prompts, b"first", message_id="a")
    assert not await bus.publish(bus.prompts, b"again", message_id="a")
    assert await bus.publish(bus.prompts, b"other", message_id="b")
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
    consumer = await workers(bus)
    await until_beaten(bus, 5)
    assert await consumer.fetch(1) == []
    holder.send_signal(signal.SIGKILL)
    await holder.wait()
    delivery = await fetch_one(consumer)
    assert (delivery.payload, delivery.num_delivered) == (b"work", 2)
    await delivery.ack()
    assert await num_messages(bus, bus.prompts.name) == 0


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
    async with working(await workers(bus), handle, give_up=give_up):
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
        async with working(await workers(bus), handle, max_deliveries=3):
            await until(is_buried)
    assert [event["delay_s"] for event in events if event["event"] == "message.put_back"] == [0.5, 1.0]
    assert await num_messages(bus, bus.prompts.name) == 0


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
    async with working(await workers(bus), handle, give_up=give_up):
        await until(was_tried)
    assert await num_messages(bus, bus.prompts.name) == 1
    assert await num_messages(bus, bus.dead.name) == 0


async def test_a_message_put_back_waits_for_its_delay(workers: OpenConsumer, bus: Bus) -> None:
    """A message that is published after it is delivered before it."""
    await bus.publish(bus.prompts, b"x", message_id="a")
    consumer = await workers(bus, ack_wait_s=30.0)
    delivery = await fetch_one(consumer)
    await delivery.put_back(2.0)
    await bus.publish(bus.prompts, b"y", message_id="b")
    fetched = [await fetch_one(consumer) for _ in range(2)]
    assert [(each.payload, each.num_delivered) for each in fetched] == [(b"y", 1), (b"x", 2)]


async def test_a_fresh_consumer_gets_all_that_was_in_hand(workers: OpenConsumer, bus: Bus) -> None:
    """After a restart of the only reader nothing waits for ack_wait."""
    for name in "abc":
        await bus.publish(bus.prompts, name.encode(), message_id=name)
    before = await workers(bus, ack_wait_s=60.0)
    held = [await fetch_one(before) for _ in range(3)]
    await held[1].ack()
    after = await workers(bus, ack_wait_s=60.0, fresh=True)
    assert [(await fetch_one(after)).payload for _ in range(2)] == [b"a", b"c"]


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
    """Thirty messages, three places: all handled, once each, never four at a time."""
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
    async with working(await workers(bus), handle, concurrency=3):
        await until(are_done)
    assert most == 3
    assert sorted(seen, key=int) == [str(index).encode() for index in range(30)]


async def test_an_oversized_payload_is_refused_and_the_largest_is_taken(bus: Bus) -> None:
    """The bound counts the header in: one byte less is stored, and the connection lives on."""
    largest = bus.max_payload_bytes("big")
    with pytest.raises(
        InvalidRequestError, match=r"message big of \d+ bytes is over .*max_payload = .*raise max_payload"
    ):
        await bus.publish(bus.groups, bytes(largest + 1), message_id="big")
    assert await bus.publish(bus.groups, bytes(largest), message_id="big")
    assert await bus.publish(bus.groups, b"small", message_id="small")


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
    kept = await fetch_one(consumer)
    assert kept.payload == b"b"
    assert not await consumer.has_delivered_all()
    again = await fetch_one(consumer)
    assert (again.payload, again.num_delivered) == (b"a", 2)
    assert await consumer.has_delivered_all()


async def test_a_message_whose_handlers_die_is_buried_unhandled(workers: OpenConsumer, bus: Bus) -> None:
    """A process that is killed while it handles a message raises nothing; after max_deliveries the next gives up."""
    given_up: list[str] = []

    async def handle(delivery: Delivery) -> None:
        raise AssertionError

    async def give_up(delivery: Delivery, reason: str) -> None:
        given_up.append(reason)

    async def is_buried() -> bool:
        return await num_messages(bus, bus.prompts.name) == 0

    await bus.publish(bus.prompts, b"kills", message_id="a")
    consumer = await workers(bus, ack_wait_s=30.0)
    for _ in range(2):
        await (await fetch_one(consumer)).put_back()
    async with working(consumer, handle, max_deliveries=2, give_up=give_up):
        await until(is_buried)
    assert given_up == [
        "delivered 3 times without an outcome (max_deliveries = 2): the process that handled it was killed or froze "
        "each time"
    ]
    assert await num_messages(bus, bus.dead.name) == 1


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


async def test_a_publish_waits_out_a_restart_of_the_server(
    workers: OpenConsumer, tmp_path: Path, run_name: str
) -> None:
    """While the server is away a publish waits; afterwards it is stored once, and what was stored before is there."""
    async with contextlib.AsyncExitStack() as server:
        url = await server.enter_async_context(local_server(tmp_path))
        port = int(url.rsplit(":", 1)[1])
        async with connect(BusConfig(url=url), run=run_name) as bus:
            await bus.ensure_streams()
            await bus.publish(bus.prompts, b"before", message_id="before")
            consumer = await workers(bus)
            await server.aclose()
            with capture_logs() as events:
                pending = asyncio.create_task(bus.publish(bus.prompts, b"during", message_id="during"))
                await until(lambda: "bus.store_retried" in [event["event"] for event in events])
            assert not pending.done()
            async with local_server(tmp_path, port=port):
                await promptly(pending)
                assert await num_messages(bus, bus.prompts.name) == 2
                assert not await bus.publish(bus.prompts, b"before", message_id="before")
                assert {(await fetch_one(consumer)).payload for _ in range(2)} == {b"before", b"during"}


@pytest.mark.parametrize("waiting", ["publish", "put", "fetch"])
async def test_a_server_that_comes_back_without_its_store_is_an_error(
    workers: OpenConsumer, tmp_path: Path, run_name: str, waiting: str
) -> None:
    """Whoever waits for the stream, the bucket or the consumer hears that it is gone, where, and what to do."""
    async with contextlib.AsyncExitStack() as server:
        url = await server.enter_async_context(local_server(tmp_path / "first"))
        port = int(url.rsplit(":", 1)[1])
        async with connect(BusConfig(url=url), run=run_name) as bus:
            await bus.ensure_streams()
            bucket, consumer = await bus.bucket("policy"), await workers(bus)

            async def fetch_forever() -> None:
                while True:
                    await consumer.fetch(1)

            await server.aclose()
            attempt, what = {
                "publish": (lambda: bus.publish(bus.prompts, b"x", message_id="x"), f"stream {run_name}_PROMPTS"),
                "put": (lambda: bus.put(bucket, "current", b"1"), "the bucket for the write of current"),
                "fetch": (fetch_forever, f"consumer workers of stream {run_name}_PROMPTS"),
            }[waiting]
            pending = asyncio.ensure_future(attempt())
            async with local_server(tmp_path / "second", port=port):
                with pytest.raises(
                    SetupError, match=rf"{what} is gone from NATS at {url}: .*start the processes of the run again"
                ):
                    await promptly(pending)


async def test_a_restarted_server_is_given_time_to_be_ready(bus: Bus) -> None:
    """Answers of "nobody here" are borne for a while; a server without JetStream for longer is an error."""
    answers = iter([nats.js.errors.ServiceUnavailableError(), nats.js.errors.NotFoundError(), None])

    async def look() -> None:
        if error := next(answers, nats.js.errors.ServiceUnavailableError()):
            raise error

    presence = bus.presence("stream s", look)
    for _ in range(4):
        await presence.check()
    with unittest.mock.patch("penstock.bus.failures._NOT_READY_S", 0.0), pytest.raises(SetupError, match="JetStream"):
        await presence.check()


async def test_what_cannot_be_set_up_is_one_line(workers: OpenConsumer, tmp_path: Path, run_name: str) -> None:
    """A server that stops answering, or has no room: SetupError at each of the first things that a process does."""
    async with local_server(tmp_path) as url, connect(BusConfig(url=url), run=run_name) as bus:
        await bus.ensure_streams()
        pid = int((tmp_path / "nats.pid").read_text())
        full = nats.js.errors.ServerError(code=500, description="insufficient storage resources available")
        with unittest.mock.patch.object(bus.jetstream, "add_stream", side_effect=full):
            with pytest.raises(SetupError, match=rf"NATS at {url}: stream .* \(insufficient storage .*has room"):
                await bus.ensure_streams()
            with pytest.raises(SetupError, match=rf"NATS at {url}: bucket {run_name}_policy .* \(insufficient storage"):
                await bus.bucket("policy")
        os.kill(pid, signal.SIGSTOP)
        try:
            with unittest.mock.patch.object(bus.jetstream, "_timeout", 0.2):
                for setting_up in (bus.ensure_streams(), bus.bucket("policy"), workers(bus)):
                    with pytest.raises(SetupError, match=rf"NATS at {url}: .* could not be set up \(nats: timeout\)"):
                        await setting_up
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("path", ["deploy/nats.conf", "deploy/docker/nats.conf", "penstock/bus/local_server.py"])
def test_every_server_keeps_what_it_acknowledged_and_bears_several_large_groups(path: str) -> None:
    """With NATS' defaults a power cut loses two minutes, and a client is cut off that has 64 MB outstanding, or takes
    10 s for what was sent."""
    text = (Path(__file__).parents[2] / path).read_text()
    settings = ("max_payload: 32MB", "max_pending: 512MB", 'write_deadline: "60s"', "sync_interval: always")
    assert all(setting in text for setting in settings)


async def test_no_server_is_one_line_that_says_what_to_do() -> None:
    """SetupError names bus.url, its value and the remedy."""
    with pytest.raises(SetupError, match=r"bus.url = 'nats://127.0.0.1:9'.*penstock serve nats"):
        async with connect(BusConfig(url="nats://127.0.0.1:9"), run="r", timeout_s=0.5):
            pass
    with pytest.raises(SetupError, match=r"bus.url is empty.*--bus.url="):
        async with connect(BusConfig(), run="r"):
            pass
