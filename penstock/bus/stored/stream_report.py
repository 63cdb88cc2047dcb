"""Reports a run's streams and their consumers, with what waits in each."""

import time
from dataclasses import dataclass

import nats.js.errors

from penstock.bus.connection import Bus, Stream
from penstock.bus.failures import BUS_ERRORS, describe
from penstock.errors import UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerReport:
    """One consumer of a stream."""

    name: str
    num_pending: int
    """Messages not yet delivered to it."""
    num_in_hand: int
    """Messages delivered but not yet acked."""
    num_redelivered: int
    """Messages in hand that had been delivered before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport:
    """One stream of a run."""

    name: str
    num_messages: int
    size_bytes: int
    oldest_age_s: float | None
    """Seconds since the oldest message was stored; None if there is none, or if it was not asked for."""
    consumers: tuple[ConsumerReport, ...]


async def report_streams(bus: Bus, *, with_ages: bool = True) -> list[StreamReport]:
    """Return a report of each of the run's streams that exists.

    Args:
        bus: The run's bus.
        with_ages: Whether to find the age of each stream's oldest message, which fetches the message.

    Raises:
        UnavailableError: the server does not answer.
    """
    try:
        reports = [await _report(bus, stream, with_age=with_ages) for stream in bus.streams]
    except BUS_ERRORS as error:
        raise UnavailableError(f"NATS at {bus.config.url} does not answer: {describe(error)}") from None
    return [report for report in reports if report is not None]


async def _report(bus: Bus, stream: Stream, *, with_age: bool) -> StreamReport | None:
    try:
        state = (await bus.jetstream.stream_info(stream.name)).state
        consumers = await bus.jetstream.consumers_info(stream.name)
    except nats.js.errors.NotFoundError:
        return None
    return StreamReport(
        name=stream.name,
        num_messages=state.messages,
        size_bytes=state.bytes,
        oldest_age_s=await _oldest_age_s(bus, stream, state.first_seq) if with_age and state.messages else None,
        consumers=tuple(
            ConsumerReport(
                name=each.name,
                num_pending=each.num_pending or 0,
                num_in_hand=each.num_ack_pending or 0,
                num_redelivered=each.num_redelivered or 0,
            )
            for each in consumers
        ),
    )


async def _oldest_age_s(bus: Bus, stream: Stream, sequence: int) -> float | None:
    try:
        message = await bus.jetstream.get_msg(stream.name, seq=sequence)
    except nats.js.errors.NotFoundError:
        return None  # acked meanwhile
    assert message.time is not None
    return max(0.0, time.time() - message.time.timestamp())
