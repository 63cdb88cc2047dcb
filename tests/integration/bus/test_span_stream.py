"""Spans on their way to the run folder, on a real nats-server that goes away and comes back."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.errors import BadRequestError

from penstock.bus import span_stream
from penstock.bus.connection import Bus, connect
from penstock.bus.local_server import local_server
from penstock.bus.span_stream import (
    SEND_EVERY_S,
    SpanReader,
    StoredBatch,
    ask_for_spans,
    ensure_span_stream,
    sending_spans,
)
from penstock.config import BusConfig
from penstock.runtime.security import Security
from penstock.telemetry import spans
from services.trainer.telemetry import span_files
from services.trainer.telemetry.span_files import collecting_spans
from services.view.trace_reader import TraceReader
from tests.support.waiting import HANG_S, until

_MAX_BYTES = 2**24


@pytest.fixture(autouse=True)
def buffer() -> Iterator[spans.SpanBuffer]:
    """The spans of this process, for this test."""
    yield spans.open_buffer("worker-0", max_waiting=50)
    spans.close_buffer()


def _turns(folder: Path) -> list[int]:
    return [span.attributes["turn"] for span in TraceReader(folder).read().spans]


async def test_spans_reach_the_run_folder_each_once(
    nats_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that were sent while the trainer was away, and those that it has when it ends."""
    monkeypatch.setattr(span_files, "_LAST_S", HANG_S)
    config = BusConfig(url=nats_url)
    async with connect(config, run=run_name) as bus:
        async with sending_spans(config, run=run_name, security=Security()):
            async with collecting_spans(bus, tmp_path, max_bytes=_MAX_BYTES):
                spans.record("turn", time.monotonic(), turn=0)
                await until(lambda: _turns(tmp_path) == [0])
            spans.record("turn", time.monotonic(), turn=1)
            await until(lambda: len(spans.buffer() or ()) == 0)
        async with collecting_spans(bus, tmp_path, max_bytes=_MAX_BYTES):
            await until(lambda: _turns(tmp_path) == [0, 1])
            spans.record("turn", time.monotonic(), turn=2)
        assert _turns(tmp_path) == [0, 1, 2]
        trace = TraceReader(tmp_path).read()
        assert (trace.num_dropped, trace.num_lost_batches) == (0, 0)
        assert all(abs(span.start - time.time()) < 60 for span in trace.spans)
        await bus.delete_run()


async def test_spans_wait_while_the_server_is_away(
    run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process keeps the oldest and counts the rest; the server comes back, and so do both sides."""
    connected: list[Bus] = []

    @contextlib.asynccontextmanager
    async def connect_and_tell(*args: Any, **options: Any) -> AsyncIterator[Bus]:
        async with connect(*args, **options) as bus:
            connected.append(bus)
            yield bus

    monkeypatch.setattr(span_stream, "connect", connect_and_tell)  # for the sender's own connection
    async with contextlib.AsyncExitStack() as server:
        url = await server.enter_async_context(local_server(tmp_path / "nats"))
        port, config = int(url.rsplit(":", 1)[1]), BusConfig(url=url)
        async with (
            connect(config, run=run_name) as bus,
            sending_spans(config, run=run_name, security=Security()),
            collecting_spans(bus, tmp_path, max_bytes=_MAX_BYTES),
        ):
            spans.record("turn", time.monotonic(), turn=0)
            await until(lambda: _turns(tmp_path) == [0])
            await server.aclose()
            await until(lambda: not any(each.client.is_connected for each in (bus, *connected)))
            for turn in range(1, 101):
                spans.record("turn", time.monotonic(), turn=turn)
            async with local_server(tmp_path / "nats", port=port):
                await until(lambda: len(_turns(tmp_path)) == 51, timeout_s=40)
                assert _turns(tmp_path) == list(range(51))
                spans.record("turn", time.monotonic(), turn=101)
                await until(lambda: _turns(tmp_path)[-1] == 101)
                assert TraceReader(tmp_path).read().num_dropped == 50


async def test_spans_do_not_wait_for_the_disk(bus: Bus) -> None:
    """They may be lost, and a server would sync each message of each process."""
    await ensure_span_stream(bus)
    assert (await bus.jetstream.stream_info(bus.spans.name)).config.persist_mode == api.PersistMode.ASYNC


async def test_what_is_stored_under_numbers_that_were_given_before_is_read(bus: Bus) -> None:
    """The server has lost the end of the stream and more has come than it lost, before the reader looks."""

    async def store(*numbers: int) -> None:
        for number in numbers:
            await bus.jetstream.publish(bus.spans.subject, b'{"number": %d}' % number)

    async def read() -> list[bytes]:
        return [batch.payload for batch in await reader.read()]

    await ensure_span_stream(bus)
    reader = SpanReader(bus)
    await store(1, 2)
    assert len(await read()) == 2
    await bus.jetstream.delete_stream(bus.spans.name)
    await ensure_span_stream(bus)
    await store(3, 4, 5)
    await reader.close()
    assert await read() == [b'{"number": 3}', b'{"number": 4}', b'{"number": 5}']
    await store(6)
    await reader.close()
    assert await read() == [b'{"number": 6}']
    await reader.close()


async def test_what_is_no_line_that_can_be_read_is_passed_over(bus: Bus) -> None:
    """Anyone with the token may send anything, also what no parser reads to its end."""
    await ensure_span_stream(bus)
    last = b'{"number": 2}'
    for payload in (
        *(b'{"number": 1}', b"[1]", b'{"number": ', b'{"number":\n1}', b'{"number": "\xff"}', b'{"number": NaN}'),
        *(b'{"number": "\\ud83d"}', b'{"number": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", last),
    ):
        await bus.jetstream.publish(bus.spans.subject, payload)
    reader, found = SpanReader(bus), list[bytes]()
    while last not in found:
        found += [batch.payload for batch in await reader.read()]
    assert found == [b'{"number": 1}', last]
    await reader.close()


def test_a_read_brings_several_messages_of_each_process() -> None:
    """Each read costs the server and the trainer about as much as a message; sixteen processes fit into one."""
    assert span_files._READ_EVERY_S >= 2 * SEND_EVERY_S
    assert span_stream._FETCH >= 16 * span_files._READ_EVERY_S / SEND_EVERY_S


async def test_processes_send_at_once_what_they_are_asked_for(
    bus: Bus, bus_config: BusConfig, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the collecting asks when it ends, as it does not wait for the next time of each process."""
    monkeypatch.setattr(span_stream, "SEND_EVERY_S", 100 * HANG_S)

    async def has_sent() -> bool:
        await ask_for_spans(bus)
        return not len(spans.buffer() or ())

    async with sending_spans(bus_config, run=run_name, security=Security()):
        spans.record("turn", time.monotonic(), turn=0)
        await until(has_sent)
    asked = await bus.client.subscribe(f"{bus.spans.subject}.asked")
    async with collecting_spans(bus, tmp_path, max_bytes=_MAX_BYTES):
        await until(lambda: _turns(tmp_path) == [0])
        assert not asked.pending_msgs
    await asked.next_msg(timeout=HANG_S)


async def test_a_stream_of_an_earlier_release_goes_on(
    bus: Bus, bus_config: BusConfig, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is synced and stays so; one with other settings is an error."""
    with monkeypatch.context() as earlier:
        earlier.setattr(Bus, "unsynced", Bus.jetstream)
        await ensure_span_stream(bus)
    async with (
        sending_spans(bus_config, run=run_name, security=Security()),
        collecting_spans(bus, tmp_path, max_bytes=_MAX_BYTES),
    ):
        spans.record("turn", time.monotonic(), turn=0)
        await until(lambda: _turns(tmp_path) == [0])
    assert (await bus.jetstream.stream_info(bus.spans.name)).config.persist_mode is None
    monkeypatch.setattr(span_stream, "_MAX_BYTES", 2**20)
    with pytest.raises(BadRequestError):
        await ensure_span_stream(bus)


async def test_the_last_batches_of_several_processes_come_one_by_one(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collecting goes on for as long as a process may have something to send, also after a read that brought
    nothing, and does not wait for processes that go on to send."""
    monkeypatch.setattr(span_files, "_LAST_S", HANG_S)
    now, reads = 100.0, itertools.count()
    monkeypatch.setattr(
        span_files, "time", SimpleNamespace(monotonic=lambda: now, time=time.time, time_ns=time.time_ns)
    )

    async def read(_: SpanReader) -> list[StoredBatch]:
        nonlocal now
        number, now = next(reads), now + span_files._MORE_S / 6
        if number % 2:
            return []
        sent = spans.SpanBuffer(f"worker-{number}")
        sent.add("turn", time.monotonic(), time.monotonic(), {"turn": number})
        return [StoredBatch(sequence=number + 1, stored_at=time.time(), payload=sent.take_batch(1)[0])]

    monkeypatch.setattr(SpanReader, "read", read)
    async with asyncio.timeout(HANG_S / 2):
        async with collecting_spans(bus, tmp_path, max_bytes=_MAX_BYTES):
            pass
    assert _turns(tmp_path) == [0, 2, 4]


async def test_a_fetch_that_brings_nothing_does_not_end_the_collecting(
    nats_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine nats-py returns no messages, where it otherwise raises that the time is over."""
    fetch, num_calls = JetStreamContext.PullSubscription.fetch, 0

    async def fetch_nothing_first(*args: Any, **options: Any) -> list[Msg]:
        nonlocal num_calls
        num_calls += 1
        return [] if num_calls == 1 else await fetch(*args, **options)

    monkeypatch.setattr(JetStreamContext.PullSubscription, "fetch", fetch_nothing_first)
    config = BusConfig(url=nats_url)
    async with connect(config, run=run_name) as bus:
        async with (
            sending_spans(config, run=run_name, security=Security()),
            collecting_spans(bus, tmp_path, max_bytes=_MAX_BYTES),
        ):
            spans.record("turn", time.monotonic(), turn=0)
            await until(lambda: _turns(tmp_path) == [0])
        await bus.delete_run()


async def test_a_process_runs_without_a_server_and_ends_promptly(
    run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans are no reason to wait, at the start or during the run, and at the end not for long."""
    monkeypatch.setattr("penstock.bus.connection._CONNECT_TIMEOUT_S", 600.0)
    assert span_stream._LAST_WORDS_S <= 2.0
    async with (
        asyncio.timeout(HANG_S),
        sending_spans(BusConfig(url="nats://127.0.0.1:1"), run=run_name, security=Security()),
    ):
        spans.record("turn", time.monotonic())
        await asyncio.sleep(0.1)
