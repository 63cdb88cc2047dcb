"""The spans of a run's processes on their way to the run folder: a bounded stream that may lose some.

    process: record -> buffer -> (every 2 s) -> [SPANS] -> trainer -> trace/spans-*.jsonl

In an evaluation without a trainer, `penstock eval` takes the trainer's place. When either ends, it asks all
processes to send at once what they have.

Invariants: no process waits for its spans, or fails for them. While NATS is away they wait in the process's buffer;
while the trainer is away they wait in the stream. Both drop what exceeds their bound. A buffer drops its newest spans
and counts them; the stream drops its oldest, which leaves a gap in the numbers of the batches. Spans are also lost if a
server's machine fails before the last ones are on its disk, because a single server does not sync them.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

import msgspec
import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api

from penstock.bus.connection import Bus, connect
from penstock.bus.failures import BUS_ERRORS, describe
from penstock.config import BusConfig
from penstock.errors import PenstockError
from penstock.runtime.security import Security
from penstock.telemetry import spans

log = structlog.get_logger()

_MAX_BYTES = 64 * 2**20
"""Spans that wait for a trainer that is being restarted: about half a million."""
_MAX_AGE_S = 3600.0
SEND_EVERY_S: Final = 2.0
"""A message costs nats-server and the trainer the same whatever it holds, so few large ones are sent."""
_BATCH = 1000
"""Spans of one message: about 200 kB."""
_RETRY_S = 5.0
_LAST_WORDS_S = 2.0
"""Seconds that a process which ends has to send its last spans."""
_FETCH = 32
_FETCH_WAIT_S = 1.0
_LOOK_EVERY = 10
"""Fetches in a row that bring nothing, after which the consumer is looked at: a restarted server has forgotten it."""
_FORGET_AFTER_S = 300.0
"""Seconds without a fetch after which the server removes a consumer."""
_line_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


async def ensure_span_stream(bus: Bus) -> None:
    """Create the stream; one server does not sync it message by message.

    Raises:
        nats.errors.Error: the server does not create it.
    """
    config = api.StreamConfig(
        name=bus.spans.name,
        subjects=[bus.spans.subject],
        retention=bus.spans.retention,
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.OLD,
        max_bytes=_MAX_BYTES,
        max_age=_MAX_AGE_S,
        num_replicas=bus.config.replicas,
    )
    if bus.config.replicas == 1:
        with suppress(nats.js.errors.BadRequestError):  # an earlier release made a synced one
            await bus.unsynced.add_stream(config)
            return
    await bus.jetstream.add_stream(config)


@asynccontextmanager
async def sending_spans(config: BusConfig, *, run: str, security: Security) -> AsyncIterator[None]:
    """Send the spans of this process during the context, over a connection of their own.

    Does nothing if the process keeps no spans, or has no bus. No failure leaves it.
    """
    if spans.buffer() is None or not config.url:
        yield
        return
    ending, due = asyncio.Event(), asyncio.Event()
    sending = asyncio.create_task(_keep_sending(config, run, security, ending, due))
    try:
        yield
    finally:
        ending.set()
        due.set()
        await asyncio.wait({sending}, timeout=_LAST_WORDS_S)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def ask_for_spans(bus: Bus) -> None:
    """Ask all processes of the run to send at once what they have; nobody answers. No failure leaves it."""
    if not bus.client.is_connected:
        return
    try:
        await bus.client.publish(_asking_subject(bus))
    except BUS_ERRORS as error:
        log.debug("spans.asking_failed", reason=describe(error))


def _asking_subject(bus: Bus) -> str:
    return f"{bus.spans.subject}.asked"


async def _keep_sending(
    config: BusConfig, run: str, security: Security, ending: asyncio.Event, due: asyncio.Event
) -> None:
    """Send every two seconds, and whenever `due` is set, until `ending` is."""

    async def hasten(_: Msg) -> None:
        due.set()

    while True:
        try:
            async with connect(config, run=run, security=security) as bus:
                await ensure_span_stream(bus)
                await bus.client.subscribe(_asking_subject(bus), cb=hasten)
                while not ending.is_set():
                    await _pause(due, SEND_EVERY_S)
                    due.clear()
                    await _send(bus)
                await bus.client.flush(timeout=1)
                return
        except (PenstockError, *BUS_ERRORS) as error:
            log.debug("spans.send_failed", reason=str(error))
            if ending.is_set():
                return
            await _pause(ending, _RETRY_S)


async def _pause(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _send(bus: Bus) -> None:
    """Send what waits. While the server is away, it goes on waiting."""
    buffer = spans.buffer()
    while buffer is not None and len(buffer) and bus.client.is_connected:
        payload, num_spans = buffer.take_batch(_BATCH)
        try:
            await bus.client.publish(bus.spans.subject, payload)
        except BUS_ERRORS as error:
            buffer.drop_batch(num_spans)
            log.debug("spans.lost", num_spans=num_spans, reason=str(error))
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """A batch as the server has it."""

    sequence: int
    stored_at: float | None
    """Seconds since 1970 by the server's clock; None: it has not passed the server."""
    payload: bytes
    """One line of JSON without its end; see `SpanBuffer.take_batch`."""


class SpanReader:
    """Reads the batches of a run, in order, each once; after the server has lost some, all again."""

    def __init__(self, bus: Bus, *, after: int = 0) -> None:
        """Read those with a sequence number above `after`."""
        self._bus = bus
        self._after = after
        self._last = b""
        """The batch of that number, if this process has read it."""
        self._consumer: JetStreamContext.PullSubscription | None = None
        self._num_empty = 0
        self._num_last = 0

    @property
    def is_behind(self) -> bool:
        """Whether the last read brought as many batches as a read can, so that more may wait."""
        return self._num_last == _FETCH

    @property
    def last_sequence(self) -> int:
        """Sequence number of the last batch that was read."""
        return self._after

    async def read(self) -> Sequence[StoredBatch]:
        """Return the next batches; none if none came within a second.

        Raises:
            nats.errors.Error: the server is away; call it again.
        """
        try:
            if self._consumer is None:
                self._consumer = await self._open()
            messages = await self._consumer.fetch(_FETCH, timeout=_FETCH_WAIT_S)
        except TimeoutError:
            messages = []
        except BUS_ERRORS:
            await self.close()
            raise
        self._num_last = len(messages)
        if not messages:  # nats-py returns none, too, if the server says so just before the time is over
            self._num_empty += 1
            if self._num_empty % _LOOK_EVERY == 0:
                await self._look()
            return ()
        self._num_empty = 0
        batches = [
            StoredBatch(
                sequence=message.metadata.sequence.stream,
                stored_at=message.metadata.timestamp.timestamp(),
                payload=message.data,
            )
            for message in messages
        ]
        self._after, self._last = batches[-1].sequence, batches[-1].payload
        return [batch for batch in batches if is_line(batch.payload)]

    async def close(self) -> None:
        """Stop reading; the server removes the consumer some minutes later."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            try:
                await consumer.unsubscribe()
            except BUS_ERRORS as error:
                log.debug("spans.close_failed", reason=describe(error))

    async def _open(self) -> JetStreamContext.PullSubscription:
        await ensure_span_stream(self._bus)
        stream = self._bus.spans
        if not await self._goes_on(stream.name):
            self._after = 0  # those who draw spans count a batch once that was stored twice
        return await self._bus.jetstream.pull_subscribe(
            stream.subject,
            stream=stream.name,
            config=api.ConsumerConfig(
                deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=self._after + 1,
                ack_policy=api.AckPolicy.NONE,
                inactive_threshold=_FORGET_AFTER_S,
            ),
        )

    async def _goes_on(self, stream: str) -> bool:
        """Return whether the stream still has what was read.

        It may be another one, or the server has lost its end and gives the numbers again.
        """
        state = (await self._bus.jetstream.stream_info(stream)).state
        if state.last_seq < self._after:
            return False
        if not self._last or state.first_seq > self._after:
            return True
        return (await self._bus.jetstream.get_msg(stream, seq=self._after)).data == self._last

    async def _look(self) -> None:
        if self._consumer is not None:
            try:
                await self._consumer.consumer_info()
            except BUS_ERRORS:  # only one server of a cluster has it, which may be away for long
                await self.close()


def is_line(payload: bytes) -> bool:
    """Return whether this is one line of JSON: anyone with the token may send anything."""
    if b"\n" in payload:
        return False
    try:
        payload.decode()
        _line_decoder.decode(payload)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        return False
    return True
